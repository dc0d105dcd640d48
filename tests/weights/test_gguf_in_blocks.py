"""A GGUF file that stays in its blocks gives the model that its dequantised weights give."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from gguf_blocks import encode
from gguf_files import model_metadata, model_tensors, write_gguf
from tiny import save_tiny, tiny_model

from piecework.config import EngineConfig
from piecework.engine.fit import fit
from piecework.errors import ConfigError
from piecework.explain.explain import explain
from piecework.explain.text import headline
from piecework.explain.weights import describe_weights
from piecework.layers.blocks import BlockEmbedding, BlockLinear, MixedBlockLinear
from piecework.layers.linear import Linear
from piecework.models.config import ModelConfig
from piecework.models.decoder import CausalLM
from piecework.native import isa, library, reads_panels
from piecework.ops.block_kinds import KINDS, OF_SIZE
from piecework.ops.block_packing import kind_of
from piecework.profile import Profile
from piecework.quantization.choose import choose_reader
from piecework.quantization.load import load_model
from piecework.quantization.sizes import float_outline, weight_bytes
from piecework.runner.load import load
from piecework.weights.gguf.checkpoint import GgufCheckpoint

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
LARGE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama tied": ("llama", "llama", {"tie_word_embeddings": True, "num_key_value_heads": 2}),
    "llama biases": ("llama", "llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3": ("qwen3", "qwen3", {}),
    "qwen3moe": ("qwen3_moe", "qwen3moe", {"mlp_only_layers": []}),
}


def _path(folder: Path, case: str, kinds: dict[str, str], **sizes: Any) -> Path:
    """A tiny model as a file, each matrix of the kind of the first of `kinds` in its name, where it fits."""
    name, architecture, changes = CASES[case]
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    sizes = sizes or SIZES
    model = tiny_model(name, **sizes, **(plain if name == "llama" else {}), **changes)
    tensors: dict[str, Any] = {}
    for key, value in model_tensors(model, architecture).items():
        kind = next((k for part, k in kinds.items() if part in key), None)
        whole = kind is not None and value.ndim >= 2 and value.shape[-1] % KINDS[kind].channels == 0
        tensors[key] = (encode(value, kind), kind) if kind and whole else value
    metadata = model_metadata(model.config, architecture)
    return write_gguf(folder / "m.gguf", architecture, metadata, tensors)


def _file(folder: Path, case: str, kinds: dict[str, str], **sizes: Any) -> GgufCheckpoint:
    return GgufCheckpoint(_path(folder, case, kinds, **sizes), folder)


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


def _kinds_of(model: CausalLM) -> dict[str, set[str]]:
    """The kinds of blocks of each projection that has some."""
    found: dict[str, set[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, BlockLinear | BlockEmbedding):
            found.setdefault(name.split(".")[-1], set()).add(kind_of(module.weight).name)
        elif isinstance(module, MixedBlockLinear):
            kinds = "+".join(OF_SIZE[kind].name for kind in module.kinds)
            found.setdefault(name.split(".")[-1], set()).add(kinds)
    return found


def _check(model: CausalLM, plain: CausalLM, most: float = 3e-2) -> None:
    """Int8 activations cost half a step of 1 / 127 of the largest of 32 channels in every layer."""
    expected, got = _logits(plain), _logits(model)
    assert (got - expected).norm() / expected.norm() < most


@pytest.mark.parametrize(
    ("kind", "case"),
    [(kind, case) for kind in KINDS for case in CASES if "moe" not in case or kind in ("Q4_1", "Q4_K")],
)
def test_logits_are_those_of_the_dequantised_weights(tmp_path: Path, case: str, kind: str) -> None:
    sizes = LARGE if KINDS[kind].channels == 256 else SIZES
    checkpoint = _file(tmp_path, case, {"token_embd": "Q8_0", "": kind}, **sizes)
    model, plain = _load(checkpoint, True), _load(checkpoint, False)
    checkpoint.close()
    assert set().union(*_kinds_of(model).values()) == {kind, "Q8_0"} and model.dtype == torch.float32
    left = [n for n, m in model.named_modules() if isinstance(m, Linear)]
    assert all(name.endswith("mlp.gate") for name in left) and bool(left) == (case == "qwen3moe")
    # Where two experts are nearly as good, it chooses the other.
    _check(model, plain, 0.15 if "moe" in case else 3e-2)
    if "moe" not in case:
        assert sum(p.nbytes for p in model.parameters()) < 0.4 * sum(p.nbytes for p in plain.parameters())


@pytest.mark.parametrize("case", ["llama tied", "llama biases", "qwen3"])
def test_parts_of_several_kinds_stay_as_they_are(tmp_path: Path, case: str) -> None:
    """As in llama.cpp's Q4_K_M: half of the layers have v and down in more bits; so has the head."""
    kinds = {
        "0.attn_v": "Q6_K",
        "0.ffn_down": "Q6_K",
        "attn_output": "Q4_K",
        "output": "Q6_K",
        "token_embd": "Q6_K",
        "": "Q4_K",
    }
    checkpoint = _file(tmp_path, case, kinds, **LARGE)
    model, plain = _load(checkpoint, True), _load(checkpoint, False)
    assert _kinds_of(model) == {
        "embed_tokens": {"Q6_K"},
        "qkv_proj": {"Q4_K+Q6_K", "Q4_K"},
        "o_proj": {"Q4_K"},
        "gate_up_proj": {"Q4_K"},
        "down_proj": {"Q6_K", "Q4_K"},
        **({} if plain.lm_head is None else {"lm_head": {"Q6_K"}}),
    }
    _check(model, plain)
    assert (model.model.layers[0].self_attn.qkv_proj.bias is not None) == ("biases" in case)
    # In memory as in the file, but for 2.8% of Q4_K; norms and biases are float.
    stored = sum(checkpoint.read_blocks(n).nbytes for n in checkpoint.names() if len(checkpoint.shape(n)) > 1)
    assert sum(p.nbytes for p in model.parameters() if p.dtype == torch.uint8) < 1.03 * stored
    checkpoint.close()


def test_rows_that_are_no_whole_blocks_of_256_have_those_of_32(tmp_path: Path) -> None:
    """What llama.cpp writes for a Q4_K_M of a small model: Q5_0 and Q8_0 in place of Q4_K and Q6_K."""
    kinds = {"attn_v": "Q8_0", "ffn_down": "Q4_K", "token_embd": "Q8_0", "": "Q5_0"}
    sizes = {"hidden_size": 96, "intermediate_size": 256, "head_dim": 24}
    checkpoint = _file(tmp_path, "llama tied", kinds, **sizes)
    model, plain = _load(checkpoint, True), _load(checkpoint, False)
    checkpoint.close()
    assert _kinds_of(model)["qkv_proj"] == {"Q5_0+Q8_0"} and _kinds_of(model)["down_proj"] == {"Q4_K"}
    _check(model, plain)


def test_native_pieces_take_them_and_it_is_said_what_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = {"0.attn_v": "Q6_K", "ffn_down": "Q5_K", "token_embd": "Q6_K", "": "Q4_K"}
    path = _path(tmp_path, "llama tied", kinds, **LARGE)
    config = {"model": str(path), "quantization": "gguf", "dtype": "bfloat16"}
    report = explain(EngineConfig.from_flat(config))
    for program in report.programs:
        assert {kind.compiler for kind in program.kinds} == {"native"}
    assert "run as one call" in report.capture.eager_steps
    assert {w.type: w.matrices for w in report.weights} == {"Q4_K": 9, "Q5_K": 3, "Q6_K": 2}
    assert "; matrices: 9 Q4_K (" in headline(report)
    assert f"{path}: 22 matrices stay in their blocks (17 Q4_K, 3 Q5_K, 2 Q6_K), 0 are" in caplog.text


@pytest.mark.parametrize("moved", ["attn_v", "attn_q"])
def test_a_projection_of_which_a_part_is_float_is_dequantised(
    tmp_path: Path, moved: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows of 64 channels are no blocks of 256, so that `_path` leaves the part float32."""
    kinds = {moved: "Q4_K", "attn_": "Q4_1", "ffn_": "Q5_0", "token_embd": "Q5_1"}
    model = _load(_file(tmp_path, "llama tied", kinds), True)
    assert set(_kinds_of(model)) == {"o_proj", "gate_up_proj", "down_proj", "embed_tokens"}
    assert "9 are dequantised (6 Q4_1, 3 F32)" in caplog.text
    assert _logits(model).isfinite().all()


def test_only_gguf_files_have_blocks() -> None:
    class Other:
        where = "/models/float"
        config: ClassVar[dict[str, Any]] = {}

    with pytest.raises(ConfigError, match=r"quantization.*/models/float is no GGUF file"):
        choose_reader(Other(), "gguf")  # type: ignore[arg-type]


UNCAPTURED = {"decode_graph": "eager", "prefill_graph": "eager"}


@pytest.mark.parametrize(
    ("kinds", "settings", "in_blocks", "dtype"),
    [
        ({"": "Q4_1"}, {}, True, "bfloat16" if isa() == "avx512_bf16" else "float32"),
        ({"": "Q4_1"}, {"dtype": "bfloat16"}, True, "bfloat16"),
        ({"": "Q4_1"}, {"dtype": "float32"}, False, "float32"),
        ({"": "Q4_1"}, {"dtype": "float32", "quantization": "gguf"}, True, "float32"),
        ({"": "Q4_1"}, {"quantization": "none"}, False, "bfloat16"),
        ({"": "Q4_1"}, {"device": "sim", "compilation_config": UNCAPTURED}, False, "float32"),
        ({}, {}, False, "float32"),
    ],
    ids=["auto", "bfloat16", "float32", "both", "none", "sim", "float file"],
)
def test_auto_keeps_blocks_where_they_are_fast(
    tmp_path: Path, kinds: dict[str, str], settings: dict[str, Any], in_blocks: bool, dtype: str
) -> None:
    if library() is None:
        pytest.skip("there are no kernels here")
    tokenizer = save_tiny(tmp_path / "tokenizer", "qwen3", tokenizer=True)
    paths = {"model": str(_path(tmp_path, "qwen3", kinds)), "tokenizer": str(tokenizer)}
    config = EngineConfig.from_flat({**paths, "max_model_len": 64, "num_pages": 8, **settings})
    model = load(config, Profile()).runner.programs.model
    assert bool(_kinds_of(model)) == in_blocks
    assert model.dtype == getattr(torch, dtype)
    if "device" not in settings:  # captures for the report take long on sim
        assert ("Q4_1" in headline(explain(config))) == in_blocks
    assert (fit(config).asked.quantization == "gguf") == in_blocks


def test_blocks_without_a_kernel_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("piecework.quantization.in_blocks.library", lambda: None)
    checkpoint = _file(tmp_path, "qwen3", {"": "Q4_0"})
    _load(checkpoint, True)
    checkpoint.close()
    assert f"{checkpoint.where}: no kernel multiplies by blocks here" in caplog.text


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("in_blocks", [True, False])
def test_the_size_is_known_before_loading(tmp_path: Path, case: str, in_blocks: bool) -> None:
    checkpoint = _file(tmp_path, case, {"token_embd": "Q8_0", "attn_k": "Q5_0", "ffn_up": "Q8_0", "": "Q4_1"})
    outline = float_outline(ModelConfig.from_dict(checkpoint.config), torch.float32)
    said = weight_bytes(outline, checkpoint, checkpoint if in_blocks else None)
    model = _load(checkpoint, in_blocks)
    checkpoint.close()
    assert said == sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("repack", [True, False])
def test_matrices_beside_blocks_are_laid_out_as_those_of_other_files(tmp_path: Path, repack: bool) -> None:
    """Loading, `explain` and `check-env` agree on it: embedding, head and routers are no blocks here."""
    if not reads_panels():
        pytest.skip("no kernel here multiplies coded weights")
    tokenizer = save_tiny(tmp_path / "tokenizer", "qwen3", tokenizer=True)
    path = _path(tmp_path, "qwen3moe", {"blk": "Q8_0"})
    settings = {"model": str(path), "tokenizer": str(tokenizer), "max_model_len": 64, "num_pages": 8}
    config = EngineConfig.from_flat({**settings, "dtype": "bfloat16", "repack": repack})
    model = load(config, Profile()).runner.programs.model
    kinds = {w.type: w.matrices for w in describe_weights(model)}
    assert kinds.get("bfloat16 in 12 bits", 0) == (2 if repack else 0) and "Q8_0" in kinds
    assert explain(config).weights == describe_weights(model)
    assert fit(config).asked.weight_bytes == sum(p.nbytes for p in model.parameters())
