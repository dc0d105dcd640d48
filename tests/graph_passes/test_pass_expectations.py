"""How often a pass should match: one warning where it doesn't, an error in strict mode."""

from __future__ import annotations

from typing import Any

import pytest
from pass_graphs import (
    OPS,
    add_rms_norm,
    function_graph,
    model_graph,
    random_model,
    warnings_of,
)
from torch.fx import GraphModule

from piecework.graph.passes import (
    GraphPass,
    PassError,
    PassManager,
    PatternPass,
)


def nothing(name: str, **settings: Any) -> GraphPass:
    return GraphPass(name=name, rewrite=lambda graph, context: 0, **settings)


def small_graph() -> GraphModule:
    return function_graph(lambda x, w: OPS.rms_norm(x, w, 1e-5) * 2, ("T", 8), (8,))


@pytest.mark.parametrize(
    ("expect", "met"), [("each_layer", True), ("at_least_one", True), (6, True), (5, False), (None, True)]
)
def test_expectations(expect: Any, met: bool, caplog: pytest.LogCaptureFixture) -> None:
    module = model_graph(random_model("llama"))
    pm = PassManager(module)
    pm.add(add_rms_norm, eps=1e-5, expect=expect)
    pm.apply()
    assert warnings_of(caplog) == ([] if met else ["pass add_rms_norm: 6 matches, expected 5"])


def test_a_layer_that_does_not_match_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    model = random_model("llama")
    model.model.layers[1].post_attention_layernorm.eps = 1e-6
    pm = PassManager(model_graph(model))
    pm.add(add_rms_norm, eps=1e-5)
    assert pm.apply()["add_rms_norm"].matches == 5
    assert warnings_of(caplog) == ["pass add_rms_norm: 5 matches, expected a multiple of 3 layers"]


def test_a_miss_is_one_warning_that_says_what_was_in_the_way(caplog: pytest.LogCaptureFixture) -> None:
    pm = PassManager(layers=1)
    pm.add(
        PatternPass(
            name="never",
            pattern=lambda x, w, eps: OPS.rms_norm(x, w, eps),
            replacement=lambda x, w, eps: OPS.rms_norm(x, w, eps) * 1,
            where=lambda match: False,
            expect="each_layer",
        )
    )
    for _ in range(3):
        pm.apply(small_graph())
    assert warnings_of(caplog) == [
        "pass never: 0 matches, expected a multiple of 1 layers; 1 times not: its condition does not hold"
    ]


def test_a_miss_is_an_error_in_strict_mode() -> None:
    pm = PassManager(model_graph(random_model("llama")), strict=True)
    pm.add(add_rms_norm, eps=1e-6)
    with pytest.raises(PassError, match=r"^pass add_rms_norm: 0 matches, expected a multiple of 3 layers"):
        pm.apply()


def test_expectations_are_not_held_against_a_part_of_a_model(caplog: pytest.LogCaptureFixture) -> None:
    pm = PassManager(strict=True)
    pm.add(nothing("a", expect=3))
    pm.add(nothing("b", expect="each_layer"))
    pm.apply(small_graph(), expectations=False)
    assert warnings_of(caplog) == []
    only_layers = PassManager(small_graph(), strict=True)
    only_layers.add(nothing("b", expect="each_layer"))
    only_layers.apply()  # a graph without layers
