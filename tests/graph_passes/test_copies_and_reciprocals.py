"""erase_copy and div_fuse: off by default, and careful about who shares memory with whom."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_models import fuse
from pass_graphs import count, function_graph
from torch import Tensor

from piecework.graph.passes import FusionPlan, make_manager

H = ("T", 8)


def _into_residual(x: Tensor, y: Tensor) -> Tensor:
    residual = x * 2
    residual.copy_(y)
    return residual + 1


def _result_is_read(x: Tensor, y: Tensor) -> Tensor:
    return (x * 2).copy_(y) + 1


def _through_a_later_view(x: Tensor, y: Tensor) -> Tensor:
    residual = torch.empty_like(x)
    residual.copy_(y)
    return residual.view(-1, 4) * 3


def _read_before_and_after(x: Tensor, y: Tensor) -> Tensor:
    residual = x * 2
    early = residual + 1
    residual.copy_(y)
    return early * residual


@pytest.mark.parametrize(
    "fn",
    [_into_residual, _result_is_read, _through_a_later_view, _read_before_and_after],
    ids=lambda f: f.__name__,
)
def test_a_copy_that_is_only_read_is_its_source(fn: Any) -> None:
    module = function_graph(fn, H, H)
    assert count(module, "aten::copy_") == 1
    (entry,) = fuse(module, "erase_copy")
    assert (entry.status, entry.matches, entry.error, entry.bitwise) == ("applied", 1, 0.0, True)
    assert count(module, "aten::copy_") == 0
    x, y = torch.randn(5, 8), torch.randn(5, 8)
    assert torch.equal(module(x, y), fn(x, y))


def _into_an_input(x: Tensor, y: Tensor) -> Tensor:
    return x.copy_(y) + 1


def _source_is_written(x: Tensor, y: Tensor) -> Tensor:
    residual, source = x * 2, y * 3
    residual.copy_(source)
    source.add_(1)
    return residual + source


def _buffer_is_written(x: Tensor, y: Tensor) -> Tensor:
    residual = (x * 2).copy_(y)
    residual.add_(1)
    return residual * 2


def _earlier_view_is_read(x: Tensor, y: Tensor) -> Tensor:
    residual = x * 2
    view = residual.view(-1, 4)
    residual.copy_(y)
    return view * 3


def _returned(x: Tensor, y: Tensor) -> Tensor:
    return (x * 2).copy_(y)


def _broadcast(x: Tensor, y: Tensor) -> Tensor:
    return (x * 2).copy_(y[:1]) + 1


def _another_dtype(x: Tensor, y: Tensor) -> Tensor:
    return (x * 2).copy_(y.double()) + 1


def _another_layout(x: Tensor, y: Tensor) -> Tensor:
    return (x * 2).copy_(y.t().contiguous().t()).view(-1, 4) + 1


def _part_of_itself(x: Tensor, y: Tensor) -> Tensor:
    both = torch.cat([x, y])
    return both[: x.shape[0]].copy_(both[x.shape[0] :]) + 1


REASONS = {
    _into_an_input: "the buffer is not the graph's own",
    _source_is_written: "the buffer or the source is written afterwards",
    _buffer_is_written: "the buffer or the source is written afterwards",
    _earlier_view_is_read: "another view of the buffer is read afterwards",
    _returned: "the buffer is a result of the graph",
    _broadcast: "the source has another shape, layout or dtype than the buffer",
    _another_dtype: "the source has another shape, layout or dtype than the buffer",
    _another_layout: "the source has another shape, layout or dtype than the buffer",
}


@pytest.mark.parametrize(("fn", "reason"), REASONS.items(), ids=lambda v: getattr(v, "__name__", ""))
def test_a_copy_that_somebody_could_notice_stays(fn: Any, reason: str) -> None:
    module = function_graph(fn, H, H)
    (entry,) = fuse(module, "erase_copy")
    assert (entry.matches, entry.refused, count(module, "aten::copy_")) == (0, {reason: 1}, 1)


def test_a_copy_within_one_buffer_stays() -> None:
    module = function_graph(_part_of_itself, torch.empty(3, 8), torch.empty(3, 8))
    assert fuse(module, "erase_copy")[0].matches == 0 and count(module, "aten::copy_") == 1


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: 1 / (1 / x) + y,
        lambda x, y: x.reciprocal().reciprocal() + y,
        lambda x, y: x.pow(-1).reciprocal() + y,
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reciprocal_of_a_reciprocal(fn: Any, dtype: torch.dtype) -> None:
    module = function_graph(fn, H, H, dtype=dtype)
    (entry,) = fuse(module, "div_fuse")
    assert (entry.status, entry.matches, entry.bitwise) == ("applied", 1, False)
    assert entry.error is not None and entry.error > 0  # it is not: both divisions round
    assert [count(module, f"aten::{op}") for op in ("reciprocal", "pow", "mul", "add")] == [0, 0, 0, 1]


def _writes(x: Tensor, y: Tensor) -> Tensor:
    return x.reciprocal().reciprocal().mul_(y) + x


@pytest.mark.parametrize(
    "fn",
    [
        _writes,
        lambda x, y: x.reciprocal().reciprocal(),
        lambda x, y: 1 / (2 / x) + y,
        lambda x, y: x.pow(-2).reciprocal() + y,
    ],
)
def test_what_is_no_pair_or_could_be_noticed_stays(fn: Any) -> None:
    module = function_graph(fn, H, H)
    (entry,) = fuse(module, "div_fuse")
    assert entry.matches == 0
    assert fn is not _writes or entry.refused == {"memory that it reads or returns is written": 1}
    assert count(module, "aten::reciprocal") >= 1


def test_halves_overflow_too_early() -> None:
    module = function_graph(lambda x, y: x.reciprocal().reciprocal() + y, H, H, dtype=torch.float16)
    (entry,) = fuse(module, "div_fuse")
    assert (entry.matches, entry.refused) == (0, {"its dtype overflows too early, or changes": 1})


def test_neither_runs_unless_it_is_asked_for() -> None:
    for device in ("cpu", "cuda", "sim", "npu"):
        names = [p.name for p in make_manager(fusions=FusionPlan.of(device, torch.float32)).passes]
        assert "add_rms_norm" in names and not {"div_fuse", "erase_copy"} & set(names)
    assert [p.name for p in make_manager(["div_fuse"]).passes] == ["div_fuse"]
