"""Managers that are made of names, as a configuration has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pass_graphs import (
    OPS,
    count,
    function_graph,
)
from torch import Tensor
from torch.fx import GraphModule

from piecework.errors import ConfigError
from piecework.graph.passes import (
    available,
    make_manager,
)


def small_graph() -> GraphModule:
    return function_graph(lambda x, w: OPS.rms_norm(x, w, 1e-5) * 2, ("T", 8), (8,))


def test_managers_are_made_by_name() -> None:
    names = [p.name for p in make_manager().passes]
    assert names[-2:] == ["common_subexpressions", "dead_code"]
    assert not [n for n in names if n.startswith("raise_")]
    assert make_manager(foreign=True).passes[0].name == "raise_rms_norm"
    chosen = make_manager(["dead_code", "raise_linear"], ["dead_code"])
    assert [p.name for p in chosen.passes] == ["dead_code", "raise_linear"]
    assert chosen.apply(small_graph())["dead_code"].status == "disabled"
    assert {a.origin for a in available().values() if a.name.startswith("raise_")} == {"piecework"}


@pytest.mark.parametrize(
    ("passes", "disable", "field"), [(["x"], [], "passes"), (None, ["x"], "disable_passes")]
)
def test_an_unknown_name_is_refused_with_the_known_ones(passes: Any, disable: Any, field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}='x' is not allowed: names of raise_rms_norm, "):
        make_manager(passes, disable)


def test_canonicalise_can_be_left_out() -> None:
    pm = make_manager(disable=["canonicalise"])
    module = function_graph(lambda x: x.reshape(-1, 4) * 2, ("T", 8))
    assert pm.apply(module)["canonicalise"].status == "disabled"
    assert count(module, "aten::reshape") == 1


def test_results_of_functions_are_the_same_after_all_default_passes() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        a = OPS.rms_norm(x, w, 1e-5)
        b = OPS.rms_norm(x, w, 1e-5)
        (x * 3).sum()
        return a + b.reshape(-1, 8), b

    module = function_graph(fn, ("T", 8), (8,))
    report = make_manager(verify=True, strict=True).apply(module)
    assert (report["common_subexpressions"].matches, count(module, "piecework::rms_norm")) == (1, 1)
    x, w = torch.randn(5, 8), torch.randn(8)
    torch.testing.assert_close(module(x, w), fn(x, w), rtol=0, atol=0)
