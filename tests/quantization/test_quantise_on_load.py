"""A float checkpoint becomes int8 as it is read: numbers, memory, and the graphs of every mode."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from int8_checkpoints import change, int8_rows, loaded, logits
from reference import nrmse
from rss import run_measured
from safetensors.torch import load_file
from tiny import save_tiny, tiny_model
from torch import nn

from piecework import LLM
from piecework.errors import ConfigError, ModelError
from piecework.graph.trace import trace
from piecework.layers.int8 import Int8Linear, StaticInput, W8A8Linear
from piecework.quantization.numerics import covering, offset_bias, quantise_rows_, static_input

QUANTISED = 4e-2  # as in test_int8_formats.py


def test_weights_are_rounded_to_the_nearest_step_of_their_row() -> None:
    weight = torch.randn(9, 33, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    out = torch.empty(9, 33, dtype=torch.int8)
    scale = quantise_rows_(weight.clone(), out)
    expected, scales = int8_rows(weight[weight.any(1)])
    assert torch.equal(out[weight.any(1)], expected) and torch.equal(scale[weight.any(1)], scales[:, 0])
    assert not out[3].any() and scale[3] == 1
    assert ((out * scale[:, None] - weight).abs() <= scale[:, None] * 0.5001).all()
    assert out[weight.any(1)].abs().amax(1).eq(127).all()


@pytest.mark.parametrize(("low", "high"), [(-3.0, 5.0), (0.0, 2.0), (-4.0, 0.0), (1.0, 2.0), (0.0, 0.0)])
def test_static_scales_cover_their_range(low: float, high: float) -> None:
    for symmetric in (True, False):
        static = static_input(low, high, symmetric=symmetric)
        x = torch.tensor([low, 0.0, high])
        codes = (x / static.scale + static.offset).round()
        assert codes.min() >= -128 and codes.max() <= 127 and codes[1] == static.offset
        assert ((codes - static.offset) * static.scale - x).abs().max() <= 0.51 * static.scale
        assert not (symmetric and static.offset)


def test_one_scale_covers_several() -> None:
    assert covering([StaticInput(0.5), StaticInput(2.0)]) == StaticInput(2.0)
    first, second = static_input(-1, 3, symmetric=False), static_input(-4, 1, symmetric=False)
    both = covering([first, second])
    assert (-128 - both.offset) * both.scale == pytest.approx(-4, abs=both.scale)
    assert (127 - both.offset) * both.scale == pytest.approx(3, abs=both.scale)
    assert covering([first, first]) == first


def test_an_offset_is_undone_exactly() -> None:
    weight = torch.randint(-128, 128, (6, 40), dtype=torch.int8)
    x = torch.randint(-128, 128, (3, 40))
    exact = (x - 17) @ weight.long().T
    assert torch.equal(x @ weight.long().T + offset_bias(weight, 17), exact)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("scheme", ["w8a8-dynamic", "w8"])
def test_a_float_model_is_quantised_but_for_head_router_and_experts(
    tmp_path: Path, name: str, scheme: str
) -> None:
    model = loaded(save_tiny(tmp_path, name), scheme)
    floats = {n for n, module in model.named_modules() if type(module).__name__ in ("Linear", "PackedLinear")}
    dense = {n for n, module in model.named_modules() if isinstance(module, Int8Linear)}
    assert all(n == "lm_head" or n.endswith("mlp.gate") for n in floats)
    assert sum(n.endswith("qkv_proj") for n in dense) == model.config.num_layers
    assert not any(parameter.is_meta for parameter in model.parameters())
    # Which experts a token gets may change with a rounding, so a mixture has no bound of its own here.
    assert nrmse(logits(model), logits(tiny_model(name))) < (0.1 if name == "qwen3_moe" else QUANTISED)


def test_an_input_that_is_int8_is_not_quantised_again(tmp_path: Path) -> None:
    layer = loaded(save_tiny(tmp_path, "llama"), "w8a8-dynamic").model.layers[0].mlp.down_proj
    x = torch.randn(5, 96)
    q, scale = torch.ops.piecework.dynamic_quantize(x)
    assert torch.equal(layer(q, scale), layer(x))
    with pytest.raises(ValueError, match="dynamic"):
        layer(q)
    static = W8A8Linear(layer.weight, layer.scale, dtype=torch.float32, static=StaticInput(0.02, 3))
    codes = torch.ops.piecework.quantize(x, static.input_scale, static.input_reciprocal, static.input_offset)
    assert torch.equal(static(codes), static(x)) and static(x).dtype == torch.float32


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama")
    change(folder, model__layers__1__mlp__up_proj__weight=torch.full((96, 64), torch.inf))
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight.*not finite"):
        loaded(folder, "w8a8-dynamic")


@pytest.mark.parametrize("asked", ["w8a8-static", "compressed-tensors", "modelslim", "ascend"])
def test_what_a_float_checkpoint_cannot_be_is_refused(tmp_path: Path, asked: str) -> None:
    with pytest.raises(ConfigError, match=f"quantization='{asked}'.*float weights"):
        loaded(save_tiny(tmp_path, "llama"), asked)


def test_missing_float_weights_are_listed_with_the_others(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama")
    change(folder, drop=("model.norm.weight", "model.layers.0.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"(?s)2 missing.*norm\.weight.*up_proj\.weight \[96, 64\]"):
        loaded(folder, "w8")


def traced_ops(model: nn.Module) -> tuple[dict[str, int], list[torch.Tensor]]:
    """How often each op stands in the graph, and the weights that the int8 products take."""
    found = trace(model, [torch.zeros(4, dtype=torch.int64), torch.arange(4)], names=["ids", "positions"])
    placeholders = found.graph_module.graph.find_nodes(op="placeholder")
    tensors = {node: b.tensor for node, b in zip(placeholders, found.bindings, strict=True)}
    counts: dict[str, int] = {}
    weights = []
    for node in found.graph_module.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            name = node.target.name().removeprefix("piecework::")
            counts[name] = counts.get(name, 0) + 1
            if name in ("linear_w8a8", "linear_w8"):
                weights.append(tensors[node.args[1]])
    return counts, weights


@pytest.mark.parametrize("scheme", ["none", "w8a8-dynamic", "w8"])
def test_the_traced_graph_has_one_quantise_and_one_product_a_linear(tmp_path: Path, scheme: str) -> None:
    counts, weights = traced_ops(loaded(save_tiny(tmp_path, "llama"), scheme))
    linears = 4 * 3
    product = {"none": "linear", "w8a8-dynamic": "linear_w8a8", "w8": "linear_w8"}[scheme]
    assert {n: c for n, c in counts.items() if n.startswith("linear")} == {product: linears}
    assert counts.get("dynamic_quantize", 0) == (linears if scheme == "w8a8-dynamic" else 0)
    assert all(weight.dtype == torch.int8 for weight in weights)
    assert len({weight.data_ptr() for weight in weights}) == (0 if scheme == "none" else linears)


MODES = [
    ("cpu", "eager", "eager", "eager"),
    ("sim", "piecewise", "piecewise", "eager"),
    ("sim", "full", "eager", "eager"),
    pytest.param(("cpu", "eager", "eager", "inductor"), marks=pytest.mark.slow),
    pytest.param(("sim", "full", "piecewise", "inductor"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_mode_runs_on_int8_weights(tmp_path: Path, mode: tuple[str, str, str, str]) -> None:
    device, decode, prefill, compiler = mode
    folder = save_tiny(tmp_path, "llama")
    config: dict[str, object] = {"compiler": compiler, "decode_graph": decode, "prefill_graph": prefill}
    if device == "sim":
        config |= {"decode_capture_sizes": [1, 2], "prefill_capture_sizes": [16]}
    prompts = [[7, 8, 9, 10, 11, 12], [20, 21, 22]]
    with LLM(
        str(folder),
        dtype="float32",
        quantization="w8a8-dynamic",
        device=device,
        max_model_len=64,
        kv_cache_memory=2**24,
        compilation_config=config,
    ) as llm:
        results = llm.generate(prompts, temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
        programs = llm.service.runner.programs
        int8 = [p for p in programs.model.parameters() if p.dtype == torch.int8]
        replays = programs.counters.replays
    assert len(int8) == 12 and (replays > 0) == (device == "sim")
    reference = loaded(folder, "w8a8-dynamic")
    for prompt, result in zip(prompts, results, strict=True):
        ids = [*prompt, *result.token_ids]
        with torch.inference_mode():
            expected = reference.head(reference(torch.tensor(ids), torch.arange(len(ids))))
        for i, (token, entry) in enumerate(zip(result.token_ids, result.logprobs, strict=True)):
            row = expected[len(prompt) - 1 + i].log_softmax(-1)
            assert abs(float(row[token]) - entry.logprob) < 2e-2
            assert float(row.max()) - float(row[token]) < 2e-2


SIZES = "hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, vocab_size=320"


@pytest.mark.slow
def test_the_float_model_is_never_in_memory(tmp_path: Path) -> None:
    """64 Mi weights: 256 MiB in float32, 64 MiB in int8. The peak stays far below both together."""
    run_measured(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        f"from tiny import save_tiny\nsave_tiny({str(tmp_path)!r}, 'llama', {SIZES})",
        "pass",
    )
    weights = sum(t.numel() for n, t in load_file(tmp_path / "model.safetensors").items() if "proj" in n)
    peak = run_measured(
        f"import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]\n"
        f"from pathlib import Path\nfrom int8_checkpoints import loaded\nfrom tiny import save_tiny\n"
        f"save_tiny({str(tmp_path / 'warm')!r}, 'llama')\n"
        f"loaded(Path({str(tmp_path / 'warm')!r}), 'w8a8-dynamic')",
        f"model = loaded(Path({str(tmp_path)!r}), 'w8a8-dynamic')\n"
        "import torch\n"
        f"assert sum(p.nbytes for p in model.parameters() if p.dtype == torch.int8) == {weights}\n"
        f"assert sum(p.nbytes for p in model.parameters()) < 1.1 * {weights}",
    )
    largest = 4 * 1024 * 4096  # bytes of the largest float matrix; at most four are read at once
    print(f"{weights / 2**20:.0f} Mi weights, peak {peak / 2**20:.0f} MiB")
    assert peak < weights + 4 * largest + 2**25 < 4 * weights
