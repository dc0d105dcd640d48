"""The bytes of a model's weights are known from headers: as many as loading makes of them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from int8_checkpoints import KINDS, write
from tiny import NAMES, save_tiny

from piecework.models.config import ModelConfig
from piecework.native import library
from piecework.quantization.choose import choose_reader
from piecework.quantization.load import load_model
from piecework.quantization.sizes import float_outline, weight_bytes
from piecework.weights.load import open_checkpoint
from piecework.weights.source import Source


def _both(
    folder: Path, dtype: torch.dtype, quantization: str, load_format: str = "auto", repacked: bool = False
) -> tuple[int, int]:
    """What is said before, and what is there after loading."""
    with closing(open_checkpoint(Source("folder", folder), load_format)) as checkpoint:
        config = ModelConfig.from_dict(checkpoint.config)
        outline = float_outline(config, dtype)
        assert all(p.is_meta for p in outline.parameters())
        said = weight_bytes(outline, checkpoint, choose_reader(checkpoint, quantization), repacked=repacked)
        model = load_model(
            config,
            checkpoint,
            choose_reader(checkpoint, quantization),
            dtype=dtype,
            device=torch.device("cpu"),
            max_positions=8,
            repacked=repacked,
        )
    return said, sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("quantization", ["auto", "w8a8-dynamic", "w8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float_checkpoints(tmp_path: Path, name: str, quantization: str, dtype: torch.dtype) -> None:
    said, held = _both(save_tiny(tmp_path, name), dtype, quantization)
    assert said == held


@pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("hidden", [64, 76])
@pytest.mark.parametrize("quantization", ["auto", "w8a8-dynamic", "w8"])
def test_weights_that_are_laid_out(tmp_path: Path, quantization: str, hidden: int) -> None:
    folder = save_tiny(tmp_path, "qwen3_moe", hidden_size=hidden, moe_intermediate_size=23)
    said, held = _both(folder, torch.bfloat16, quantization, repacked=True)
    plain, _ = _both(folder, torch.bfloat16, quantization)
    assert said == held
    assert held < plain or quantization != "auto"


def test_an_int8_layer_keeps_its_bias(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    said, held = _both(folder, torch.bfloat16, "w8a8-dynamic")
    assert said == held


@pytest.mark.parametrize("quantization", ["auto", "w8a8-dynamic"])
def test_dummy_weights(tmp_path: Path, quantization: str) -> None:
    said, held = _both(save_tiny(tmp_path, "qwen3_moe"), torch.float32, quantization, "dummy")
    assert said == held


@pytest.mark.parametrize("style", ["compressed", "modelslim"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_int8_checkpoints(tmp_path: Path, kind: str, style: str, name: str) -> None:
    """What corrects an offset or holds a folded bias depends on values: it may be counted in vain."""
    folder, _ = write(tmp_path, name, kind, style)
    said, held = _both(folder, torch.float32, "auto")
    assert held <= said <= 1.03 * held
    if kind in ("dynamic", "w8") or (kind, style, name) == ("static", "compressed", "llama"):
        assert said == held


def test_another_dtype_of_an_int8_checkpoint(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, "qwen3", "dynamic")
    said, held = _both(folder, torch.bfloat16, "auto")
    assert said == held
