"""A GGUF file that stays in its blocks gives the model that its dequantised weights give."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import gguf
import pytest
import torch
from gguf_files import model_metadata, model_tensors, write_gguf
from tiny import tiny_model

from piecework.errors import ConfigError
from piecework.layers.blocks import BlockEmbedding, BlockLinear
from piecework.layers.linear import Linear
from piecework.models.config import ModelConfig
from piecework.models.decoder import CausalLM
from piecework.ops.block_linear import kind_of
from piecework.quantization.choose import choose_reader
from piecework.quantization.load import load_model
from piecework.weights.gguf.checkpoint import GgufCheckpoint

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama tied": ("llama", "llama", {"tie_word_embeddings": True, "num_key_value_heads": 2}),
    "llama biases": ("llama", "llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3": ("qwen3", "qwen3", {}),
    "qwen3moe": ("qwen3_moe", "qwen3moe", {"mlp_only_layers": []}),
}


def _file(path: Path, case: str, kinds: dict[str, str]) -> GgufCheckpoint:
    """A tiny model as a file, each matrix quantised to the kind of the first of `kinds` in its name."""
    name, architecture, changes = CASES[case]
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    model = tiny_model(name, **SIZES, **(plain if name == "llama" else {}), **changes)
    tensors: dict[str, Any] = {}
    for key, value in model_tensors(model, architecture).items():
        kind = next((k for part, k in kinds.items() if part in key), None)
        whole = value.ndim >= 2 and value.shape[-1] % 32 == 0
        tensors[key] = (getattr(gguf.quants, kind).quantize(value), kind) if kind and whole else value
    file = write_gguf(path / "m.gguf", architecture, model_metadata(model.config, architecture), tensors)
    return GgufCheckpoint(file, path)


def _load(checkpoint: GgufCheckpoint, in_blocks: bool) -> CausalLM:
    return load_model(
        ModelConfig.from_dict(checkpoint.config),
        checkpoint,
        choose_reader(checkpoint, "gguf" if in_blocks else "auto"),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_positions=64,
    )


def _logits(model: CausalLM) -> torch.Tensor:
    ids = torch.randint(0, model.config.vocab_size, (24,), generator=torch.Generator().manual_seed(3))
    valid = torch.tensor([24]) if model.config.num_experts else None
    with torch.inference_mode():
        return model.head(model(ids, torch.arange(24), valid))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_logits_are_those_of_the_dequantised_weights(tmp_path: Path, case: str, kind: str) -> None:
    checkpoint = _file(tmp_path, case, {"token_embd": "Q8_0", "": kind})
    model, plain = _load(checkpoint, True), _load(checkpoint, False)
    checkpoint.close()
    kinds = {kind_of(m.weight) for m in model.modules() if isinstance(m, BlockLinear | BlockEmbedding)}
    assert kinds == {kind, "Q8_0"} and model.dtype == torch.float32
    left = [n for n, m in model.named_modules() if isinstance(m, Linear)]
    assert all(name.endswith("mlp.gate") for name in left) and bool(left) == (case == "qwen3moe")
    expected, got = _logits(plain), _logits(model)
    # What int8 activations cost, half a step of 1 / 127 of the largest of 32 in every layer; where two
    # experts are nearly as good, it chooses the other.
    assert (got - expected).norm() / expected.norm() < (0.15 if "moe" in case else 3e-2)
    if "moe" not in case:
        assert sum(p.nbytes for p in model.parameters()) < 0.4 * sum(p.nbytes for p in plain.parameters())


def test_other_kinds_and_mixed_parts_are_dequantised(tmp_path: Path) -> None:
    kinds = {"attn_v": "Q8_0", "ffn_down": "Q5_0", "attn_": "Q4_1", "token_embd": "Q5_1"}
    model = _load(_file(tmp_path, "llama tied", kinds), True)
    blocks = {n.split(".")[-1] for n, m in model.named_modules() if isinstance(m, BlockLinear)}
    assert blocks == {"o_proj"}
    assert not isinstance(model.model.embed_tokens, BlockEmbedding)
    assert _logits(model).isfinite().all()


def test_only_gguf_files_have_blocks() -> None:
    class Other:
        where = "/models/float"
        config: ClassVar[dict[str, Any]] = {}

    with pytest.raises(ConfigError, match=r"quantization.*/models/float is no GGUF file"):
        choose_reader(Other(), "gguf")  # type: ignore[arg-type]


def test_blocks_without_a_kernel_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("piecework.quantization.in_blocks.library", lambda: None)
    checkpoint = _file(tmp_path, "qwen3", {"": "Q4_0"})
    _load(checkpoint, True)
    checkpoint.close()
    assert f"{checkpoint.where}: no kernel multiplies by blocks here" in caplog.text
