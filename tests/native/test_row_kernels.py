"""The kernels over rows against the references: sizes, tails, strides, types, and numbers that are none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import ADDS, DTYPES, GATES, NORMS, QUANTISERS, ROW_OPS, check, compare, row_case

from piecework import ops
from piecework.native import library

pytestmark = pytest.mark.skipif(library() is None, reason="the library can't be built here")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROW_OPS)
def test_rows_equal_the_reference(name: str, dtype: torch.dtype) -> None:
    for tokens in (1, 7, 33):
        for size in (64, 576, 577):
            check(name, row_case(name, tokens, size, dtype))
    check(name, row_case(name, 3, 40, dtype, offset=False))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROW_OPS)
def test_rows_equal_the_reference_over_the_grid(name: str, dtype: torch.dtype) -> None:
    for tokens in (1, 7, 256, 533, 2049):
        for size in (64, 576, 3392, 4096):
            check(name, row_case(name, tokens, size, dtype))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(ROW_OPS), st.integers(0, 20), st.integers(1, 150), st.sampled_from(DTYPES), st.booleans()
)
def test_any_size(name: str, tokens: int, size: int, dtype: torch.dtype, offset: bool) -> None:
    check(name, row_case(name, tokens, size, dtype, offset))


@pytest.mark.parametrize("name", [*GATES, *QUANTISERS, "rms_norm"])
def test_rows_with_gaps(name: str) -> None:
    x, *rest = row_case(name, 7, 48, torch.float32)
    wide = torch.randn(7, x.shape[1] + 29)
    wide[:, 5 : 5 + x.shape[1]] = x
    check(name, (wide[:, 5 : 5 + x.shape[1]], *rest))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_of_heads_in_longer_rows(dtype: torch.dtype) -> None:
    for tokens in (1, 5):
        q, k, _ = torch.randn(tokens, 7 * 24).to(dtype).split((4 * 24, 2 * 24, 24), -1)
        weight = torch.rand(24).to(dtype)
        check("rms_norm", (q.view(-1, 4, 24), weight, 1e-6))
        check("rms_norm", (k.view(-1, 2, 24), weight, 1e-6))


@pytest.mark.parametrize("name", [*ADDS, *NORMS, "dynamic_quantize"])
def test_more_dimensions(name: str) -> None:
    x, *rest = row_case(name, 12, 40, torch.float32)
    rest = [a.view(3, 4, 40) if isinstance(a, torch.Tensor) and a.shape == x.shape else a for a in rest]
    check(name, (x.view(3, 4, 40), *rest))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROW_OPS)
def test_what_is_no_number_stays_in_its_row(name: str, dtype: torch.dtype) -> None:
    x, *rest = row_case(name, 6, 70, dtype)
    x[0, 3], x[1, 69], x[2, 20] = float("nan"), float("inf"), float("-inf")
    x[3] = 0
    if name in ADDS:
        rest[0][3] = 0
    op = ops.get(name)
    results = (_all(run(x, *rest)) for run in (op.implementations["cpu"].run, op.reference))
    for got, wanted in zip(*results, strict=True):
        if got.is_floating_point():
            assert torch.equal(got.isnan(), wanted.isnan())
        # What NaN becomes as an int8 is the machine's choice.
        first = 3 if got.dtype == torch.int8 and "dynamic" not in name else 0
        compare(got[first:], wanted[first:], dtype)


def _all(result: Any) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def test_halves_go_to_the_even_number() -> None:
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 300.0, -128.5, -500.0]])
    one = torch.tensor([1.0])
    assert ops.get("quantize").implementations["cpu"].run(x, one, one).tolist() == [
        [0, 2, 2, 0, -2, 126, 127, 127, -128, -128]
    ]


def test_float32_norms_quantise_like_the_reference_almost_everywhere() -> None:
    args = row_case("add_rms_norm_dynamic_quant", 64, 576, torch.float32)
    op = ops.get("add_rms_norm_dynamic_quant")
    got, wanted = op.implementations["cpu"].run(*args), op.reference(*args)
    assert (got[0] != wanted[0]).float().mean() < 1e-3
    assert torch.equal(got[1], wanted[1])


@pytest.mark.parametrize("name", ROW_OPS)
def test_other_calls_are_left_to_the_reference(name: str) -> None:
    supports = ops.get(name).implementations["cpu"].supports
    x, *rest = row_case(name, 4, 32, torch.float32)
    assert supports is not None and supports(x, *rest)
    assert not supports(x.double(), *rest)
    assert not supports(x.t().contiguous().t(), *rest)
    if name in NORMS + ADDS:
        other = [
            a.double() if isinstance(a, torch.Tensor) and a.dim() == 1 and len(a) == 32 else a for a in rest
        ]
        assert not supports(x, *other)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_sums_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    last = 2**-8 if dtype == torch.bfloat16 else 2**-11  # half of the last place of 1
    x = torch.tensor([1.0, 1 + 2 * last, -1.0, 1.0, torch.finfo(dtype).max, 0.0, -0.0] * 3).to(dtype)
    add = torch.tensor([last, last, -last, last * 1.5, torch.finfo(dtype).max, 0.0, -0.0] * 3).to(dtype)
    generator = torch.Generator().manual_seed(3)
    x = torch.cat((x, torch.randn(500, generator=generator).to(dtype)))[None]
    add = torch.cat((add, torch.randn(500, generator=generator).to(dtype) * 0.01))[None]
    run = ops.get("add_rms_norm").implementations["cpu"].run
    assert torch.equal(run(x, add, torch.ones(x.shape[1], dtype=dtype), 1e-5)[1], x + add)


@pytest.mark.parametrize("name", [*ADDS, *NORMS, "dynamic_quantize"])
def test_rows_of_denormal_numbers(name: str) -> None:
    """A pass is verified with such rows, too: what is fused must not take them for zeros."""
    x, *rest = row_case(name, 33, 64, torch.bfloat16)
    x = (x.float() * 1e-39).bfloat16()
    assert x.count_nonzero() > x.numel() / 2
    if name in ADDS:
        rest[0] = (rest[0].float() * 1e-39).bfloat16()
        made = ops.get(name).implementations["cpu"].run(x, *rest)
        assert any(torch.equal(result, x + rest[0]) for result in made if result.dtype == x.dtype)
    check(name, (x, *rest))
