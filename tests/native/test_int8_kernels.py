"""The int8 products are exact, at every shape, and scaled as the references scale them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, compare
from rss import run_measured

from piecework import ops
from piecework.native import library, reads_panels
from piecework.ops.int8_linear import int8_product
from piecework.ops.int8_panels import lay_out, rows_of

pytestmark = pytest.mark.skipif(library() is None, reason="the library can't be built here")

w8a8 = ops.get("linear_w8a8")
w8 = ops.get("linear_w8")


def _int8(*shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The kernel's sums, whose every bit a float32 shows where they are below 2^24; see `_exact`."""
    implementation = w8a8.implementations["cpu"]
    args = (x, weight, torch.ones(weight.shape[0]), None, None, None, torch.float32)
    assert implementation.supports is not None and implementation.supports(*args)
    y: torch.Tensor = implementation.run(*args)
    return y


def _exact(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Low bits are seen by subtracting the wanted sum, less a small number, before the conversion."""
    wanted = int8_product(x, weight)
    assert torch.equal(wanted, (x.long() @ weight.long().T).int())
    for row in range(x.shape[0]):
        args = (
            x[row : row + 1],
            weight,
            torch.ones(weight.shape[0]),
            None,
            7 - wanted[row],
            None,
            torch.float32,
        )
        assert (w8a8.implementations["cpu"].run(*args) == 7).all()
    assert torch.equal(_product(x, weight), wanted.float())


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 15, 16, 32, 53, 67])
def test_products_are_exact(rows: int) -> None:
    for k, n in [(576, 192), (1536, 64), (577, 37), (31, 5), (1, 1), (16, 3), (65, 130), (4101, 23)]:
        _exact(_int8(rows, k), _int8(n, k))


def test_the_largest_sums_are_exact() -> None:
    for rows in (5, 50):
        low, weight = (
            torch.full((rows, 4099), -128, dtype=torch.int8),
            torch.full((5, 4099), -128, dtype=torch.int8),
        )
        for x, w in [(low, weight), (low, -1 - weight), (-1 - low, weight), (-1 - low, -1 - weight)]:
            _exact(x, w)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 140), st.integers(1, 80))
def test_any_shape_is_exact(rows: int, k: int, n: int) -> None:
    _exact(_int8(rows, k), _int8(n, k))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 8, 32, 451])
def test_products_of_a_model_are_exact(rows: int) -> None:
    for k, n in [(576, 960), (576, 576), (576, 3072), (1536, 576), (4096, 1023)]:
        x, weight = _int8(rows, k), _int8(n, k)
        assert torch.equal(_product(x, weight), (x.double() @ weight.double().T).float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("static", [False, True])
def test_scales_and_biases(dtype: torch.dtype, static: bool) -> None:
    for rows, k, n in [(1, 64, 48), (7, 70, 33), (33, 576, 65)]:
        x, weight, scale = _int8(rows, k), _int8(n, k), torch.rand(n) * 1e-4
        x_scale = None if static else torch.rand(rows, 1)
        quant_bias = torch.randint(-5000, 5000, (n,), dtype=torch.int32) if static else None
        for bias in (None, torch.randn(n).to(dtype), torch.randn(n)):
            args = (x, weight, scale, x_scale, quant_bias, bias, dtype)
            got = w8a8.implementations["cpu"].run(*args)
            assert got.dtype == dtype
            compare(got, w8a8.reference(*args), dtype)


def test_the_scale_of_a_row_without_numbers_reaches_its_results() -> None:
    x, weight = torch.zeros(2, 40, dtype=torch.int8), _int8(9, 40)
    x_scale = torch.tensor([[float("nan")], [0.0]])
    y = w8a8.implementations["cpu"].run(x, weight, torch.ones(9), x_scale, None, None, torch.float32)
    assert y[0].isnan().all() and not y[1].any()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 80), st.integers(1, 140), st.integers(1, 80))
def test_weights_in_panels_give_what_rows_of_them_give(rows: int, k: int, n: int) -> None:
    x, weight, scale, x_scale = _int8(rows, k), _int8(n, k), torch.rand(n), torch.rand(rows, 1)
    laid = lay_out(weight)
    assert torch.equal(rows_of(laid, n, k), weight)
    quant_bias, bias = torch.randint(-99, 99, (n,), dtype=torch.int32), torch.randn(n)
    given = [(x, w, scale, x_scale, quant_bias, bias, torch.bfloat16) for w in (laid, weight)]
    assert w8a8.resolve(("cpu", "reference"), *given[0]).name == ("cpu" if reads_panels() else "reference")
    found, wanted = (torch.ops.piecework.linear_w8a8(*args) for args in given)
    assert torch.equal(found, wanted if reads_panels() else w8a8.reference(*given[1]))


def test_laying_out_takes_no_third_copy() -> None:
    """64 MiB of weights, which are there before: their panels, and a few of them once more."""
    peak = run_measured(
        "import torch\nfrom piecework.ops.int8_panels import lay_out, rows_of\n"
        "lay_out(torch.ones(3000, 70, dtype=torch.int8))\nweight = torch.ones(16387, 4096, dtype=torch.int8)",
        "laid = lay_out(weight)\nassert len(laid) == 1025",
    )
    assert 60 * 2**20 < peak < 100 * 2**20


@pytest.mark.parametrize(("rows", "k"), [(1024, 64), (1025, 65), (2100, 130)])
def test_laying_out_in_several_steps(rows: int, k: int) -> None:
    weight = _int8(rows, k)
    assert torch.equal(rows_of(lay_out(weight), rows, k), weight)


@pytest.mark.parametrize("rows", [1, 9, 16, 33, 64, 65, 200])
def test_panels_in_several_passes(rows: int) -> None:
    x, weight = _int8(rows, 9001), _int8(85, 9001)
    args = (torch.ones(85), None, None, None, torch.float32)
    assert torch.equal(
        torch.ops.piecework.linear_w8a8(x, lay_out(weight), *args), w8a8.reference(x, weight, *args)
    )


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 70),
    st.integers(1, 150),
    st.integers(1, 70),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.booleans(),
)
def test_weight_only(rows: int, k: int, n: int, dtype: torch.dtype, biased: bool, laid: bool) -> None:
    wide = torch.randn(rows, k + 5).to(dtype)
    x, weight, scale = wide[:, 2 : 2 + k], _int8(n, k), torch.rand(n) * 0.02
    bias = torch.randn(n).to(dtype) if biased else None
    args = (x, lay_out(weight) if laid else weight, scale, bias)
    ran = w8.resolve(("cpu", "reference"), *args)
    assert ran.name == ("cpu" if reads_panels() or not laid else "reference")
    got = ran.run(*args)
    wanted = F.linear(x.double(), weight.double()) * scale + (0 if bias is None else bias)
    assert got.dtype == dtype and got.shape == (rows, n)
    if ran.name == "reference":  # its sums are rounded to x's dtype
        assert torch.equal(got, w8.reference(x, weight, scale, bias))
        return
    bound = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    size = F.linear(x.double().abs(), weight.double().abs()) * scale
    allowed = bound * (wanted.abs() + 1e-2 * size) + 1e-5 * size + 1e-6
    if dtype != torch.float32:  # x may be rounded to 16 bits of its row's largest number
        allowed += 2**-16 * x.double().abs().amax(-1, keepdim=True) * weight.double().abs().sum(-1) * scale
    assert ((got - wanted).abs() <= allowed).all()


@pytest.mark.parametrize("rows", [2, 12, 40])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("laid", [False, True])
def test_weight_only_rows_do_not_disturb_each_other(rows: int, dtype: torch.dtype, laid: bool) -> None:
    x, weight, scale = torch.randn(rows, 70).to(dtype), _int8(33, 70), torch.rand(33) * 0.02
    if laid and reads_panels():
        weight = lay_out(weight)
    run = w8.implementations["cpu"].run
    alone = run(x, weight, scale, None)
    x[0, 5], x[1] = float("nan"), 0.0
    got = run(x, weight, scale, None)
    assert got[0].isnan().all() and not got[1].any() and torch.equal(got[2:], alone[2:])
    x[0, 5] = float("inf")
    assert not run(x, weight, scale, None)[0].isfinite().any()


def test_other_calls_are_left_to_the_reference() -> None:
    x, weight, one = _int8(3, 8), _int8(4, 8), torch.ones(4)
    supports = w8a8.implementations["cpu"].supports
    assert supports is not None and supports(x, weight, one, None, None, None, torch.float32)
    assert not supports(x.int(), weight, one, None, None, None, torch.float32)
    assert not supports(x, weight, one, None, None, None, torch.float64)
    assert not supports(x, _int8(8, 4).t(), one, None, None, None, torch.float32)
    long = torch.zeros(1, 1 << 17, dtype=torch.int8)
    assert not supports(long, long, torch.ones(1), None, None, None, torch.float32)
