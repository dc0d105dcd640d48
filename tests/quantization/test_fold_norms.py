"""Norms fold into the linears behind them: the same function, and less lost to int8."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from int8_checkpoints import change, loaded, logits
from reference import nrmse
from safetensors.torch import load_file
from tiny import NAMES, save_tiny

from piecework.models.config import ModelConfig
from piecework.quantization.fold_norms import fold_norms
from piecework.quantization.load import load_model
from piecework.weights.dummy import DummyCheckpoint
from piecework.weights.safetensors import SafetensorsCheckpoint

CPU = torch.device("cpu")


def uneven(folder: Path) -> Path:
    """Make norms as those of trained models, of either sign and some large or zero, and linears that fit."""
    weights = load_file(folder / "model.safetensors")
    changed: dict[str, torch.Tensor] = {}
    for name in weights:
        layer, norm, _ = name.partition(".input_layernorm.weight")
        after, other, _ = name.partition(".post_attention_layernorm.weight")
        if norm or other:
            changed[name] = scale = torch.randn(weights[name].shape).pow(3)
            scale[3] = 0
            readers = (f"{layer}.self_attn.q_proj", f"{layer}.self_attn.k_proj", f"{layer}.self_attn.v_proj")
            for reader in readers if norm else (f"{after}.mlp.gate_proj", f"{after}.mlp.up_proj"):
                if (linear := f"{reader}.weight") in weights:
                    changed[linear] = weights[linear] / scale.abs().clamp(min=0.05)
    change(folder, **{name.replace(".", "__"): value for name, value in changed.items()})
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_the_folded_model_is_the_same_function(tmp_path: Path, name: str) -> None:
    checkpoint = SafetensorsCheckpoint(uneven(save_tiny(tmp_path, name)))
    config = ModelConfig.from_dict(checkpoint.config)
    made = {"dtype": torch.float32, "device": CPU, "max_positions": 64}
    plain = load_model(config, checkpoint, None, **made)
    folded = load_model(config, fold_norms(checkpoint), None, **made)
    for one, other in zip(plain.model.layers, folded.model.layers, strict=True):
        assert torch.equal(other.input_layernorm.weight, one.input_layernorm.weight.sign())
        dense = hasattr(other.mlp, "down_proj")
        after = one.post_attention_layernorm.weight
        assert torch.equal(other.post_attention_layernorm.weight, after.sign() if dense else after)
    assert torch.equal(folded.model.norm.weight, plain.model.norm.weight)
    torch.testing.assert_close(logits(folded), logits(plain), atol=1e-4, rtol=1e-4)


def test_less_is_lost_to_int8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = uneven(save_tiny(tmp_path, "llama"))
    exact = logits(loaded(folder, "none"))
    folded = nrmse(logits(loaded(folder, "w8a8-dynamic")), exact)
    monkeypatch.setattr("piecework.quantization.choose.fold_norms", lambda checkpoint: checkpoint)
    assert folded < 0.7 * nrmse(logits(loaded(folder, "w8a8-dynamic")), exact)


def test_what_has_no_names_stays_as_it_is(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama")
    dummy = DummyCheckpoint(SafetensorsCheckpoint(folder).config, {}, 0, str(folder))
    assert fold_norms(dummy) is dummy
