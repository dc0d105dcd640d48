"""Norms and gates with what stands around them: replaced where all conditions hold, left alone elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_models import CASES, EPS, Case, case_graph, fuse
from pass_graphs import OPS, count, function_graph
from torch import Tensor

H = ("T", 16)
ONE = torch.empty(1)


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_the_ops_are_there_before_and_replaced_after(case: Case) -> None:
    module = case_graph(case)
    assert [count(module, op) for op in case.before] == [1] * len(case.before)
    assert count(module, f"piecework::{case.after}") == 0
    (entry,) = fuse(module, case.after)
    assert (entry.status, entry.matches, entry.refused, entry.error) == ("applied", 1, {}, 0.0)
    assert [count(module, op) for op in case.before] == [0] * len(case.before)
    assert count(module, f"piecework::{case.after}") == 1
    assert not entry.bitwise


def _swapped(residual: Tensor, x: Tensor, weight: Tensor) -> Any:
    return OPS.rms_norm(residual + x, weight, 1e-6)


@pytest.mark.parametrize("fn", [_swapped, lambda x, r, w: OPS.rms_norm(r.add(x), w, eps=0.25)])
def test_order_eps_and_a_sum_that_nobody_else_reads_make_no_difference(fn: Any) -> None:
    module = function_graph(fn, H, H, (16,))
    (entry,) = fuse(module, "add_rms_norm")
    assert (entry.matches, count(module, "piecework::add_rms_norm")) == (1, 1)


def test_the_sum_may_have_other_users() -> None:
    def fn(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        total = residual + x
        q, scale = OPS.dynamic_quantize(OPS.rms_norm(total, weight, EPS))
        return q, scale, total * 2, total + residual

    module = function_graph(fn, H, H, (16,))
    (entry,) = fuse(module, "add_rms_norm_dynamic_quant")
    assert (entry.matches, entry.error, count(module, "aten::add")) == (1, 0.0, 1)


def test_int8_may_have_several_consumers() -> None:
    def fn(x: Tensor, weight: Tensor, product: Tensor, scales: Tensor) -> Any:
        q, scale = OPS.dynamic_quantize(OPS.rms_norm(x, weight, EPS))
        return [
            OPS.linear_w8a8(q, product, scales, scale, None, None, torch.float32) * factor
            for factor in (1, 2)
        ]

    product = torch.empty(8, 16, dtype=torch.int8)
    module = function_graph(fn, H, (16,), product, (8,))
    (entry,) = fuse(module, "rms_norm_dynamic_quant")
    assert (entry.matches, count(module, "piecework::linear_w8a8")) == (1, 2)


@pytest.mark.parametrize("kind", ["quantize", "dynamic_quantize", "gate"])
def test_a_float_result_that_somebody_else_takes_is_kept(kind: str) -> None:
    def fn(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        y = OPS.silu_and_mul(x) if kind == "gate" else OPS.rms_norm(residual + x, weight, EPS)
        return OPS.dynamic_quantize(y) if kind == "dynamic_quantize" else OPS.quantize(y, scale, scale), y

    module = function_graph(fn, H, H, (16,), ONE)
    names = {
        "quantize": "add_rms_norm_quant",
        "dynamic_quantize": "add_rms_norm_dynamic_quant",
        "gate": "silu_mul_quant",
    }
    entry, shorter = fuse(module, names[kind], "add_rms_norm")
    op = "silu_and_mul" if kind == "gate" else "rms_norm"
    assert entry.matches == 0
    assert entry.refused == {f"the intermediate result of piecework.{op} has another user": 1}
    assert shorter.matches == (kind != "gate")  # the norm that is kept takes its sum all the same


_HALF = torch.empty(16, dtype=torch.float16)
_DOUBLE_SCALE = torch.empty(1, dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("add_rms_norm", (H, H, _HALF)),  # gamma of another dtype
        ("add_rms_norm", (H, (1, 16), (16,))),  # a residual that is broadcast
        ("add_rms_norm", (H, ("T", 1), (16,))),
        ("add_rms_norm", (H, H, (1, 16))),  # a gamma with another shape
        ("rms_norm_quant", (H, _HALF, ONE, ONE)),
        ("rms_norm_quant", (H, (16,), torch.empty(16), ONE)),  # a scale for each channel
        ("rms_norm_quant", (H, (16,), ONE, _DOUBLE_SCALE)),
        ("rms_norm_dynamic_quant", (H, _HALF)),
        ("add_rms_norm_quant", (H, H, _HALF, ONE, ONE)),
        ("add_rms_norm_dynamic_quant", (H, ("T", 1), (16,))),
        ("silu_mul_quant", (H, torch.empty(8), ONE)),
    ],
)
def test_where_a_condition_does_not_hold_nothing_matches(name: str, shapes: tuple[Any, ...]) -> None:
    module = function_graph(CASES[name].fn, *shapes)
    text = str(module.graph)
    (entry,) = fuse(module, name)
    assert (entry.matches, entry.refused) == (0, {"its condition does not hold": 1})
    assert [count(module, op) for op in CASES[name].before] == [1] * len(CASES[name].before), text


def test_a_residual_in_another_dtype_does_not_match() -> None:
    residual = torch.empty(5, 16, dtype=torch.bfloat16)
    (entry,) = fuse(function_graph(CASES["add_rms_norm"].fn, (5, 16), residual, (16,)), "add_rms_norm")
    assert (entry.matches, entry.refused) == (0, {"its condition does not hold": 1})


def test_a_residual_that_is_written_before_the_norm_does_not_match() -> None:
    def fn(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        total = residual + x
        residual.mul_(2)
        return OPS.rms_norm(total, weight, EPS), total

    (entry,) = fuse(function_graph(fn, H, H, (16,)), "add_rms_norm")
    assert entry.refused == {"memory that it reads or returns is written in between": 1}


def test_the_result_of_the_wrong_half_is_no_scale() -> None:
    """quantize of a norm's input, and not of its result, is left alone."""

    def fn(x: Tensor, weight: Tensor, scale: Tensor) -> Any:
        return OPS.quantize(x, scale, scale), OPS.rms_norm(x, weight, EPS)

    assert fuse(function_graph(fn, H, (16,), ONE), "rms_norm_quant")[0].matches == 0
