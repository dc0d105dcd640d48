"""Every parameter is filled exactly once, and all that doesn't fit is reported at once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gguf_files import save_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from rss import run_measured
from safetensors.torch import load_file, save_file
from tiny import NAMES, save_tiny, tiny_model
from torch import Tensor, nn

from piecework.errors import ConfigError, ModelError
from piecework.models.build import build_model
from piecework.models.config import ModelConfig
from piecework.weights.load import load_weights, open_checkpoint
from piecework.weights.names import pieces_of
from piecework.weights.safetensors import SafetensorsCheckpoint
from piecework.weights.source import Source, resolve


class Recorded:
    """A checkpoint in memory that counts what is read."""

    where = "memory"

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.config: dict[str, Any] = {}
        self.generation_config: dict[str, Any] = {}
        self.reads: Counter[str] = Counter()

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str, out: Tensor) -> None:
        self.reads[name] += 1
        out.copy_(self.tensors[name])

    def close(self) -> None: ...


class Packed(nn.Module):
    def __init__(self, sizes: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((sum(sizes), width), torch.nan))
        self.bias = nn.Parameter(torch.full((sum(sizes),), torch.nan))
        self.sizes = sizes


class Model(nn.Module):
    packed_modules: ClassVar = {"abc_proj": ("a_proj", "b_proj", "c_proj")}

    def __init__(self, sizes: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.abc_proj = Packed(sizes, width)
        self.norm = nn.RMSNorm(width)


def parts(model: Model) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {"norm.weight": torch.randn(model.norm.weight.shape, generator=generator)}
    for name, size in zip("abc", model.abc_proj.sizes, strict=True):
        width = model.abc_proj.weight.shape[1]
        tensors[f"{name}_proj.weight"] = torch.randn(size, width, generator=generator)
        tensors[f"{name}_proj.bias"] = torch.randn(size, generator=generator)
    return tensors


@given(sizes=st.tuples(*[st.integers(1, 9)] * 3), width=st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_packed_parameters_are_filled_from_their_parts(sizes: tuple[int, ...], width: int) -> None:
    model = Model(sizes, width)
    checkpoint = Recorded(parts(model))
    load_weights(model, checkpoint)
    assert checkpoint.reads == Counter(checkpoint.names())
    for kind in ("weight", "bias"):
        expected = torch.cat([checkpoint.tensors[f"{n}_proj.{kind}"] for n in "abc"])
        assert torch.equal(getattr(model.abc_proj, kind), expected)
    assert torch.equal(model.norm.weight, checkpoint.tensors["norm.weight"])


def test_a_checkpoint_may_have_the_packed_weight_itself() -> None:
    model = Model((2, 3, 4), 5)
    tensors = {
        "abc_proj.weight": torch.randn(9, 5),
        "abc_proj.bias": torch.randn(9),
        "norm.weight": torch.ones(5),
    }
    load_weights(model, Recorded(tensors))
    assert torch.equal(model.abc_proj.weight, tensors["abc_proj.weight"])


def test_all_faults_are_in_one_error_and_nothing_is_read() -> None:
    model = Model((2, 3, 4), 5)
    tensors = parts(model)
    del tensors["b_proj.weight"], tensors["norm.weight"]
    tensors["c_proj.bias"] = torch.ones(7)
    tensors["extra.weight"] = torch.ones(3, 1)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    checkpoint = Recorded(tensors)
    with pytest.raises(ModelError) as error:
        load_weights(model, checkpoint)
    assert str(error.value).splitlines() == [
        "memory: the weights do not fit the model:",
        "2 missing:",
        "  b_proj.weight [3, 5]",
        "  norm.weight [5]",
        "1 unexpected:",
        "  extra.weight [3, 1]",
        "1 of another shape:",
        "  c_proj.bias [7], the model has [4]",
    ]
    assert not checkpoint.reads


def test_a_long_list_of_faults_is_cut() -> None:
    tensors = {**parts(Model((1, 1, 1), 2)), **{f"x.{i:03}": torch.ones(1) for i in range(120)}}
    with pytest.raises(ModelError) as error:
        load_weights(Model((1, 1, 1), 2), Recorded(tensors))
    text = str(error.value)
    assert "120 unexpected:" in text and "x.049 [1]" in text and "x.050" not in text and "and 70 more" in text


def test_the_loader_waits_for_an_error_of_a_read(tmp_path: Path) -> None:
    class Broken(Recorded):
        def read(self, name: str, out: Tensor) -> None:
            raise ModelError(f"{name} cannot be read")

    with pytest.raises(ModelError, match="cannot be read"):
        load_weights(Model((1, 1, 1), 2), Broken(parts(Model((1, 1, 1), 2))))


@pytest.mark.parametrize("sizes", [None, (2, 2), (2, 3, 3)])
def test_sizes_that_do_not_cover_a_parameter_are_refused(sizes: tuple[int, ...] | None) -> None:
    packed = {"abc_proj": ("a_proj", "b_proj", "c_proj")}
    with pytest.raises(ModelError, match=r"abc_proj\.weight"):
        pieces_of("x.abc_proj.weight", (9, 5), packed, sizes, lambda name: False)


@pytest.mark.parametrize("fused", [False, True])
def test_experts_come_one_by_one_or_fused(fused: bool) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w13 = nn.Parameter(torch.full((3, 8, 5), torch.nan))
            self.w2 = nn.Parameter(torch.full((3, 5, 4), torch.nan))

    model = nn.Module()
    model.experts = Experts()
    w13, w2 = torch.randn(3, 8, 5), torch.randn(3, 5, 4)
    if fused:
        tensors = {"experts.gate_up_proj": w13, "experts.down_proj": w2}
    else:
        tensors = {}
        for e in range(3):
            tensors[f"experts.{e}.gate_proj.weight"] = w13[e, :4]
            tensors[f"experts.{e}.up_proj.weight"] = w13[e, 4:]
            tensors[f"experts.{e}.down_proj.weight"] = w2[e]
    checkpoint = Recorded(tensors)
    load_weights(model, checkpoint)
    assert torch.equal(model.experts.w13, w13) and torch.equal(model.experts.w2, w2)
    assert checkpoint.reads == Counter(tensors.keys())


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    checkpoint = open_checkpoint(Source("folder", folder))
    config = ModelConfig.from_dict(checkpoint.config)
    model = build_model(config, dtype=dtype, device="cpu", max_positions=64)
    for parameter in model.parameters():
        parameter.fill_(torch.nan)
    load_weights(model, checkpoint)
    checkpoint.close()
    assert not any(p.isnan().any() for p in model.parameters())
    return model


@pytest.mark.parametrize("name", NAMES)
def test_every_model_is_filled_as_the_original(tmp_path: Path, name: str) -> None:
    model = loaded(save_tiny(tmp_path, name))
    original = tiny_model(name)
    ids = torch.randint(0, 320, (20,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        logits = model.head(model(ids, torch.arange(20)))
        torch.testing.assert_close(logits, original(ids[None]).logits[0], atol=1e-4, rtol=1e-4)


def test_a_tied_head_on_disk_is_harmless_and_an_untied_one_is_needed(tmp_path: Path) -> None:
    tied = save_tiny(tmp_path / "tied", "llama", tie_word_embeddings=True)
    tensors = load_file(tied / "model.safetensors")
    save_file({**tensors, "lm_head.weight": torch.ones(320, 64)}, tied / "model.safetensors")
    assert loaded(tied).lm_head is None
    untied = save_tiny(tmp_path / "untied", "llama")
    tensors = load_file(untied / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, untied / "model.safetensors")
    with pytest.raises(ModelError, match=r"1 missing:\n  lm_head\.weight \[320, 64\]"):
        loaded(untied)


def test_weights_are_cast_to_the_run_dtype(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama")
    full, half = loaded(folder), loaded(folder, torch.bfloat16)
    for a, b in zip(full.parameters(), half.parameters(), strict=True):
        assert b.dtype == torch.bfloat16 and torch.equal(a.to(torch.bfloat16), b)


def test_the_format_has_to_fit_the_source(tmp_path: Path) -> None:
    folder = Source("folder", save_tiny(tmp_path / "folder", "llama"))
    file = Source("gguf", save_gguf(tmp_path / "m.gguf", tiny_model("qwen3"), "qwen3"))
    for source, wrong, right in ((folder, "gguf", "safetensors"), (file, "safetensors", "gguf")):
        with pytest.raises(ConfigError, match=f"load_format='{wrong}' is not allowed"):
            open_checkpoint(source, wrong, cache_dir=tmp_path)
        for chosen in ("auto", right):
            checkpoint = open_checkpoint(source, chosen, cache_dir=tmp_path)
            assert "model.norm.weight" in checkpoint.names()
            checkpoint.close()


def test_a_bad_folder_leaves_nothing_open(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no weights"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_default_model_loads_in_little_memory(default_model: Path, tmp_path: Path, dtype: str) -> None:
    weights = 134_515_008 * (4 if dtype == "float32" else 2)
    peak = run_measured(
        f"""
        import torch
        from piecework.models.build import build_model
        from piecework.models.config import ModelConfig
        from piecework.weights.load import load_weights, open_checkpoint
        from piecework.weights.source import resolve
        from gguf import quants
        source = resolve({str(default_model)!r})
        """,
        f"""
        checkpoint = open_checkpoint(source, cache_dir={str(tmp_path)!r})
        config = ModelConfig.from_dict(checkpoint.config)
        model = build_model(config, dtype=torch.{dtype}, device="cpu", max_positions=2048)
        load_weights(model, checkpoint)
        assert sum(p.nbytes for p in model.parameters()) == {weights}
        """,
    )
    print(f"{dtype}: {peak / weights:.2f} times the weights")
    assert 0.9 * weights < peak <= 1.5 * weights


def test_the_default_models_config(default_model: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(resolve(str(default_model)), cache_dir=tmp_path)
    config = ModelConfig.from_dict(checkpoint.config)
    sizes = (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads, config.vocab_size)
    assert sizes == (576, 30, 9, 3, 49152)
    assert config.rope.theta == 100000 and config.tie_embeddings and config.eos_ids == (2,)
    norm = torch.empty(576)
    checkpoint.read("model.norm.weight", norm)
    assert np.isfinite(norm.numpy()).all() and norm.abs().mean() > 0.1
    checkpoint.close()
