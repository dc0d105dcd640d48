"""Smoothed inputs: the same function in float, and less lost to int8."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from int8_checkpoints import IDS, change, loaded, logits
from reference import nrmse
from safetensors.torch import load_file
from tiny import NAMES, save_tiny
from torch import Tensor

from piecework.cli.main import main
from piecework.models.config import ModelConfig
from piecework.models.decoder import CausalLM
from piecework.quantization.load import load_model
from piecework.quantization.on_load import FloatReader
from piecework.quantization.smooth import channel_shares, norm_before, scales, smooth
from piecework.quantization.smoothed import Smoothed
from piecework.quantization.targets import Target, find_targets, kept_float
from piecework.weights.checkpoint import Checkpoint
from piecework.weights.safetensors import SafetensorsCheckpoint


def uneven(folder: Path) -> Path:
    """Give each norm outlying channels and a zero, and its linears small columns there."""
    generator = torch.Generator().manual_seed(1)
    weights = load_file(folder / "model.safetensors")
    changed: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if not name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight")):
            continue
        changed[name] = scale = torch.randn(weight.shape, generator=generator).bfloat16().float()
        scale[:3] *= 64
        scale[3] = 0
        block = "self_attn" if "input" in name else "mlp"
        stem = f"{name.rpartition('.')[0].rpartition('.')[0]}.{block}"
        for reader in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            if (linear := f"{stem}.{reader}.weight") in weights:
                changed[linear] = weights[linear].clone()
                changed[linear][:, :3] /= 64
    change(folder, **{name.replace(".", "__"): value for name, value in changed.items()})
    return folder


def float_model(config: ModelConfig, checkpoint: Checkpoint) -> CausalLM:
    made = {"dtype": torch.float32, "device": torch.device("cpu"), "max_positions": 64}
    return load_model(config, checkpoint, None, **made)


def smoothed_by_ids(checkpoint: SafetensorsCheckpoint, strength: float) -> tuple[CausalLM, Smoothed]:
    """The float model, and its checkpoint smoothed by what it does on IDS."""
    model = float_model(ModelConfig.from_dict(checkpoint.config), checkpoint)
    reader = FloatReader(checkpoint, "w8a8-dynamic")
    reader.exclude(kept_float(model))
    targets: list[Target] = find_targets(model, reader, set(checkpoint.names()).__contains__, "here")
    linears = [target.name for target in targets if norm_before(target.name)]
    with torch.inference_mode():
        shares = channel_shares(model, [IDS.tolist()], linears)
    return model, smooth(checkpoint, targets, shares, strength)


def test_scales_are_those_of_the_paper() -> None:
    shares, weight = torch.tensor([0.5, 1.0, 0.25]), torch.tensor([2.0, 0.5, 1.0])
    found = scales(shares, weight, 0.75)
    expected = shares**0.75 / weight**0.25
    assert torch.allclose(found / found[0], expected / expected[0])
    assert float(found.prod()) == pytest.approx(1.0, rel=1e-5)
    assert torch.allclose(
        scales(shares, weight, 1.0) / found.new_tensor(1.0), shares / shares.log().mean().exp()
    )
    assert scales(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0]), 0.5).isfinite().all()


def test_shares_are_those_of_each_token_s_range(tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(save_tiny(tmp_path, "llama"))
    model = float_model(ModelConfig.from_dict(checkpoint.config), checkpoint)
    name = "model.layers.1.self_attn.qkv_proj"
    seen: list[Tensor] = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda m, x: seen.append(x[0]))
    with torch.inference_mode():
        found = channel_shares(model, [IDS[:9].tolist(), IDS[9:].tolist()], [name])
    hook.remove()
    x = torch.cat(seen).abs()
    assert list(found) == [name] and torch.equal(found[name], (x / x.amax(1, keepdim=True)).amax(0))
    assert float(found[name].max()) == 1


@pytest.mark.parametrize("name", NAMES)
def test_the_smoothed_model_is_the_same_function(tmp_path: Path, name: str) -> None:
    checkpoint = SafetensorsCheckpoint(uneven(save_tiny(tmp_path, name)))
    plain, smoothed = smoothed_by_ids(checkpoint, 0.75)
    model = float_model(plain.config, smoothed)
    for i, (one, other) in enumerate(zip(plain.model.layers, model.model.layers, strict=True)):
        dense = hasattr(one.mlp, "down_proj")
        for norm, moved in (("input_layernorm", True), ("post_attention_layernorm", dense)):
            before, after = getattr(one, norm).weight, getattr(other, norm).weight
            assert torch.equal(after, after.bfloat16().float()) and torch.equal(after == 0, before == 0)
            assert torch.equal(before, after) != moved
            assert (f"model.layers.{i}.{norm}" in smoothed.moved) == moved
    assert torch.equal(model.model.norm.weight, plain.model.norm.weight)
    assert nrmse(logits(model), logits(plain)) < 1e-5
    assert smoothed.names() == checkpoint.names()


@pytest.mark.parametrize("scheme", ["w8a8-dynamic", "w8a8-static"])
def test_less_is_lost_to_int8(tmp_path: Path, scheme: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = uneven(save_tiny(tmp_path / "float", "llama", tokenizer=True))
    texts = tmp_path / "texts.txt"
    texts.write_text("the cat sat on the mat in the other room\n\na hundred and one")
    exact = logits(loaded(folder, "none"))
    lost = {}
    for strength in ("0", "0.75"):
        out = tmp_path / strength
        command = ["quantize", str(folder), str(out), "--scheme", scheme, "--calibration", str(texts)]
        assert main([*command, "--smooth", strength, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["smoothed"] == (6 if float(strength) else 0) and told["calibration_tokens"] > 20
        lost[strength] = nrmse(logits(loaded(out)), exact)
    print(f"{scheme}: NRMSE of the logits by strength {lost}")
    assert 0 < lost["0.75"] < 0.3 * lost["0"]
