"""In whole models every fusion of the default set matches just as often as the model's structure says."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from fused_models import SCHEMES, int8_model
from pass_graphs import count, model_graph, warnings_of
from test_sample_fusions import weights_and_inputs

from piecework.graph.passes import FusionPlan, LayerInputs, PassManager, Structure, make_manager
from piecework.models.decoder import CausalLM

# Three layers; of the experts' four, the second is dense.
LAYERS = {"llama": 3, "qwen2": 3, "qwen3": 3, "qwen3_moe": 4}
DENSE = {"llama": 3, "qwen2": 3, "qwen3": 3, "qwen3_moe": 1}


def manager_of(model: CausalLM, scheme: Any, **options: Any) -> PassManager:
    structure = Structure.of(model.config, [LayerInputs(scheme, scheme, scheme)] * model.config.num_layers)
    return make_manager(fusions=FusionPlan.of("cpu", torch.float32, structure), **options)


def expected_matches(name: str, scheme: str | None) -> dict[str, int]:
    layers, dense = LAYERS[name], DENSE[name]
    attention = "split_qkv_rmsnorm_rope" if "qwen3" in name else "split_qkv_rope"
    if scheme is None:
        return {attention: layers, "add_rms_norm": 2 * layers}
    kind = "quant" if scheme == "static" else "dynamic_quant"
    # Norms before attention, but the first has no sum before it; norms of dense layers; the rest is float.
    return {
        attention: layers,
        f"add_rms_norm_{kind}": layers - 1 + dense,
        f"rms_norm_{kind}": 1,
        f"silu_mul_{kind}": dense,
        "add_rms_norm": layers - dense + 1,
    }


def check_model(name: str, scheme: str | None, **overrides: Any) -> None:
    model = int8_model(name, scheme, offset=3, **overrides)
    module = model_graph(model)
    arguments = weights_and_inputs(model, 7)
    before = module(*arguments)
    single = {op: count(module, op) for op in ("aten::add", "piecework::rotary", "piecework::silu_and_mul")}
    manager = manager_of(model, scheme, strict=True)
    report = manager.apply(module)
    found = {p: n for p, n in report.matches.items() if p not in ("canonicalise", "dead_code")}
    expected = expected_matches(name, scheme)
    assert found == {"common_subexpressions": 0, **expected}
    for op, number in expected.items():
        assert count(module, f"piecework::{op}") == number
    layers, dense = LAYERS[name], DENSE[name]
    assert single == {
        "aten::add": 2 * layers,
        "piecework::rotary": layers,
        "piecework::silu_and_mul": dense,
    }
    for op in ("aten::add", "piecework::rotary", "aten::split_with_sizes"):
        assert count(module, op) == 0
    assert count(module, "piecework::silu_and_mul") == (dense if scheme is None else 0)
    # What is left: without norms by head and sums, the first layer's norm.
    assert count(module, "piecework::rms_norm") == (1 if scheme is None else 0)
    torch.testing.assert_close(module(*arguments), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "scheme"), [("llama", None), ("qwen2", "dynamic"), ("qwen3_moe", "static")])
def test_default_fusions_match_all_there_is(name: str, scheme: str | None) -> None:
    check_model(name, scheme)


def test_another_size_of_heads_and_another_eps() -> None:
    check_model("qwen3", None, head_dim=96, rms_norm_eps=1e-6)


# Each value of each dimension with each one of every other.
OTHERS = [(1e-5, False), (1e-6, True), (1e-5, True), (1e-6, False)]
GRID = [
    (name, OTHERS[(i + j + k) % len(OTHERS)], head_dim, scheme)
    for i, name in enumerate(LAYERS)
    for j, head_dim in enumerate((64, 96, 128))
    for k, scheme in enumerate(SCHEMES)
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "others", "head_dim", "scheme"), GRID)
def test_the_grid(name: str, others: tuple[float, bool], head_dim: int, scheme: str | None) -> None:
    eps, bias = others
    # transformers' Qwen2 config knows no head_dim; ours reads it.
    overrides: dict[str, Any] = {} if name == "qwen2" else {"attention_bias": bias}
    check_model(name, scheme, rms_norm_eps=eps, head_dim=head_dim, **overrides)


@pytest.mark.parametrize("keep", ["gate_up_proj", "down_proj", "qkv_proj"])
def test_layers_that_stay_float_are_counted(keep: str) -> None:
    model = int8_model("llama", "dynamic", keep=keep)
    part = {"gate_up_proj": "mlp", "down_proj": "down", "qkv_proj": "qkv"}[keep]
    schemes: dict[str, Any] = {"qkv": "dynamic", "mlp": "dynamic", "down": "dynamic"} | {part: None}
    structure = Structure.of(model.config, [LayerInputs(**schemes)] * 3)
    manager = make_manager(fusions=FusionPlan.of("cpu", torch.float32, structure), strict=True)
    module = model_graph(model)
    report = manager.apply(module)
    quantised = {"gate_up_proj": (2, 1, 3), "down_proj": (5, 1, 0), "qkv_proj": (3, 0, 3)}[keep]
    names = ("add_rms_norm_dynamic_quant", "rms_norm_dynamic_quant", "silu_mul_dynamic_quant")
    assert tuple(report.matches.get(name, 0) for name in names) == quantised
    assert count(module, "piecework::dynamic_quantize") == 3  # o_proj's input comes from attention


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_disabled_fusion_leaves_its_places_to_others(
    scheme: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    model = int8_model("llama", scheme)
    kind = {"static": "quant", "dynamic": "dynamic_quant"}.get(scheme or "", "")
    disabled = f"add_rms_norm_{kind}" if kind else "add_rms_norm"
    with caplog.at_level(logging.WARNING):
        report = manager_of(model, scheme, disable=[disabled], strict=True).apply(model_graph(model))
    assert report[disabled].status == "disabled" and not warnings_of(caplog)
    if kind:
        # The sum is not in reach of a norm that is quantised; the last norm has its sum.
        assert (report.matches[f"rms_norm_{kind}"], report.matches["add_rms_norm"]) == (6, 1)
