"""The CPU's linear kernel equals torch's product, and a row gives the same in any batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from piecework import ops
from piecework.native import library
from piecework.ops.cpu.linear import linear_cpu, supports

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
OP = ops.get("linear")
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
DTYPES = list(BOUNDS)


def check(rows: int, outputs: int, inputs: int, dtype: torch.dtype, bias: bool) -> None:
    """Compare with the product in float64, and each row with itself alone."""
    generator = torch.Generator().manual_seed(rows * 1009 + outputs)
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    w = torch.randn(outputs, inputs, generator=generator).to(dtype)
    b = torch.randn(outputs, generator=generator).to(dtype) if bias else None
    assert OP.resolve(("cpu", "reference"), x, w, b).name == "cpu"
    y = torch.ops.piecework.linear(x, w, b)
    expected = torch.nn.functional.linear(x.double(), w.double(), None if b is None else b.double())
    bound = BOUNDS[dtype]
    torch.testing.assert_close(y.double(), expected, atol=bound * max(1, inputs) ** 0.5, rtol=bound)
    for m in {0, rows // 2, rows - 1} if rows else ():
        assert torch.equal(y[m : m + 1], linear_cpu(x[m : m + 1], w, b))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 70),
    outputs=st.integers(1, 70),
    inputs=st.integers(1, 130),
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
)
def test_odd_sizes(rows: int, outputs: int, inputs: int, dtype: torch.dtype, bias: bool) -> None:
    check(rows, outputs, inputs, dtype, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 16, 47, 101, 290])
def test_channels_in_several_passes(rows: int, dtype: torch.dtype) -> None:
    check(rows, 45, 2500, dtype, bias=True)


def test_rows_with_gaps_and_more_dimensions() -> None:
    x, w = torch.randn(5, 48), torch.randn(7, 64)[:, :32]
    expected = torch.nn.functional.linear(x[:, 16:], w)
    torch.testing.assert_close(linear_cpu(x[:, 16:], w), expected)
    assert linear_cpu(x.view(5, 1, 48)[..., 16:], w).shape == (5, 1, 7)
    torch.testing.assert_close(linear_cpu(x.t()[:32].t(), w), torch.nn.functional.linear(x[:, :32], w))


@pytest.mark.parametrize(
    ("x", "weight"), [(torch.float64, torch.float64), (torch.float32, torch.bfloat16)], ids=str
)
def test_other_types_run_in_torch(x: torch.dtype, weight: torch.dtype) -> None:
    args = (torch.ones(2, 3, dtype=x), torch.ones(4, 3, dtype=weight))
    assert not supports(*args) and OP.resolve(("cpu", "reference"), *args).name == "reference"


def test_a_transposed_weight_runs_in_torch() -> None:
    assert not supports(torch.ones(2, 3), torch.ones(3, 4).t())
