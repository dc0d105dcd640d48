"""The default sets: what they hold on each device, for each kind of model, and what they expect."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_models import int8_model
from pass_graphs import MODELS, model_graph, random_model, warnings_of

from piecework.errors import PieceworkError
from piecework.graph.passes import FusionPlan, LayerInputs, PassError, PassManager, Structure, make_manager
from piecework.graph.passes.fusions import FUSIONS
from piecework.graph.passes.sets import DEFAULT, default_fusions

PAGE = (Path(__file__).parents[2] / "docs" / "passes.md").read_text(encoding="utf-8")
FLOAT = ["split_qkv_rope", "add_rms_norm"]


def manager(structure: Structure | None, device: str = "cpu", **options: Any) -> PassManager:
    return make_manager(fusions=FusionPlan.of(device, torch.float32, structure), **options)


def chosen(structure: Structure | None, device: str = "cpu", **options: Any) -> list[str]:
    return [p.name for p in manager(structure, device, **options).passes if p.name in FUSIONS]


def structure_of(name: str, *schemes: Any) -> Structure:
    model = random_model(name)
    inputs = [LayerInputs(s, s, s) for s in schemes] or None
    return Structure.of(model.config, inputs)


@pytest.mark.parametrize("name", MODELS)
def test_a_default_set_never_warns(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = random_model(name)
    with caplog.at_level(logging.WARNING):
        report = manager(Structure.read(model), strict=True).apply(model_graph(model))
    assert not warnings_of(caplog)
    attention = "split_qkv_rmsnorm_rope" if "qwen3" in name else "split_qkv_rope"
    assert [p.name for p in report.passes if p.name in FUSIONS] == [attention, "add_rms_norm"]
    assert all(p.status == "applied" for p in report.passes if p.name in FUSIONS)


def test_sets_follow_the_quantisation() -> None:
    assert chosen(structure_of("llama")) == FLOAT
    static = ["add_rms_norm_quant", "rms_norm_quant", "silu_mul_quant"]
    dynamic = ["add_rms_norm_dynamic_quant", "rms_norm_dynamic_quant", "silu_mul_dynamic_quant"]
    assert chosen(structure_of("llama", *["static"] * 3)) == [FLOAT[0], *static, FLOAT[1]]
    assert chosen(structure_of("llama", *["dynamic"] * 3)) == [FLOAT[0], *dynamic, FLOAT[1]]
    both = chosen(structure_of("llama", "static", "dynamic", None))
    # The first layer's norm is the one without a sum.
    assert set(both) == {*FLOAT, *static, *dynamic} - {"rms_norm_dynamic_quant"}


@pytest.mark.parametrize("scheme", ["static", "dynamic"])
def test_a_model_says_itself_how_its_layers_are_quantised(scheme: Any) -> None:
    model = int8_model("qwen3_moe", scheme)
    inputs = Structure.read(model).layers
    assert inputs[1] == LayerInputs(scheme, scheme, scheme)  # the dense one
    assert {inputs[i] for i in (0, 2, 3)} == {LayerInputs(scheme)}
    assert Structure.read(random_model("qwen3_moe")).layers == (LayerInputs(),) * 4


def test_sets_follow_the_device() -> None:
    llama = structure_of("llama")
    assert chosen(llama, "sim:host") == chosen(llama, "cuda:1") == FLOAT
    assert chosen(llama, "npu") == ["add_rms_norm"]
    assert chosen(llama, "tpu") == chosen(None, "tpu") == []
    assert default_fusions("cpu", torch.float64) == frozenset()
    assert default_fusions("cpu", None) == default_fusions("cpu", torch.bfloat16)


def test_the_page_names_every_fusion_and_device() -> None:
    for name in FUSIONS:
        assert f"`{name}`" in PAGE
    for device, _ in DEFAULT:
        assert f"`{device}`" in PAGE
    assert set().union(*DEFAULT.values()) == FUSIONS.keys() - {"div_fuse", "erase_copy"}
    for name in set().union(*DEFAULT.values()):
        assert not FUSIONS[name]().bound.bitwise, "the page says so"


MISSING = ["split_qkv_rmsnorm_rope", "add_rms_norm_quant", "silu_mul_dynamic_quant", "erase_copy", "div_fuse"]


@pytest.mark.parametrize("name", MISSING)
def test_one_that_was_asked_for_and_matches_nothing_is_one_warning(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = model_graph(random_model("llama"))
    made = manager(structure_of("llama"), passes=[name, "dead_code"])
    for _ in range(2):
        assert made.apply(module)[name].matches == 0
    (warning,) = warnings_of(caplog)
    assert warning.startswith(f"pass {name}: 0 matches, expected ")
    with pytest.raises(PassError, match=f"pass {name}: 0 matches"):
        manager(structure_of("llama"), passes=[name], strict=True).apply(module)


def test_too_few_matches_are_missed_as_well(caplog: pytest.LogCaptureFixture) -> None:
    module = model_graph(random_model("llama", num_hidden_layers=2))
    manager(structure_of("llama"), passes=["add_rms_norm"]).apply(module)
    assert warnings_of(caplog) == ["pass add_rms_norm: 4 matches, expected 6"]


def test_a_graph_of_which_nothing_is_known_expects_nothing(caplog: pytest.LogCaptureFixture) -> None:
    module = model_graph(random_model("qwen3"))
    report = manager(None, strict=True).apply(module)
    assert report.matches["split_qkv_rmsnorm_rope"] == 3 and report.matches["split_qkv_rope"] == 0
    assert not warnings_of(caplog)
    with pytest.raises(PieceworkError, match="silu_mul_quant"):
        manager(None, passes=["silu_mul_quant"], strict=True).apply(module)
