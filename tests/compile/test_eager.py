"""Pieces written out as Python."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor

from piecework.compile.base import CompileContext
from piecework.compile.eager import EagerCompiler, write_python
from piecework.compile.source import make_function
from piecework.devices import make_device
from piecework.graph.trace import trace


def _piece(fn: Any, *examples: Tensor) -> Any:
    module = trace(fn, examples or [torch.ones(5, 4)]).graph_module
    return EagerCompiler().compile(module, CompileContext(make_device("cpu")))


def test_literals_of_all_kinds() -> None:
    def fn(x: Tensor) -> Tensor:
        y = torch.clamp(x, max=math.inf).masked_fill(x > 0.5, -math.inf)
        z = torch.cat([y, torch.zeros_like(x, dtype=torch.float64).float()], -1)
        return torch.nan_to_num(z[:, 1:6:2], neginf=-7.0).sum(-1, keepdim=True, dtype=torch.float64)

    x = torch.randn(3, 4)
    (got,) = _piece(fn)([x])
    torch.testing.assert_close(got, fn(x))


def test_several_results_and_inputs_given_back() -> None:
    piece = _piece(lambda x: (x, x + 1, *torch.split(x * 2, 2, -1)))
    x = torch.randn(2, 4)
    results = piece([x])
    assert results[0] is x and len(results) == 4
    torch.testing.assert_close(results[3], (x * 2)[:, 2:])
    assert not piece.opaque and "return" in piece.source


def test_results_are_written_into_given_buffers() -> None:
    piece = _piece(lambda x: (x + 1, x * 2))
    x, buffers = torch.randn(3, 4), [torch.empty(3, 4), torch.empty(3, 4)]
    places = [b.data_ptr() for b in buffers]
    results = piece([x], buffers)
    assert [r.data_ptr() for r in results] == places
    torch.testing.assert_close(buffers[0], x + 1)
    torch.testing.assert_close(buffers[1], x * 2)


def test_values_are_let_go_after_their_last_use() -> None:
    alive: list[Any] = []
    graph = trace(lambda x: torch.relu(x * 2).sum(-1) + 1, [torch.ones(5, 4)]).graph_module.graph

    def multiply(x: Tensor, y: Any) -> Tensor:
        result = torch.mul(x, y)
        alive.append(weakref.ref(result))
        return result

    def total(x: Tensor, dim: Any) -> Tensor:
        alive.append(alive[0]())
        return torch.sum(x, dim)

    names = {str(n.target): n for n in graph.nodes}
    targets = {names["aten.mul.Tensor"]: multiply, names["aten.sum.dim_IntList"]: total}
    function = make_function(*write_python(graph, targets))
    function(torch.ones(2, 4))
    assert alive[1] is None
