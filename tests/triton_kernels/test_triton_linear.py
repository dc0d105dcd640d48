"""Products with int8 weights: exact before scaling, and as the references say behind it."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from kernel_calls import FLOATS, same

import piecework.ops as ops

# rows, outputs, inputs: tails in every dimension, one row, a batch of each block size
SHAPES = [(1, 33, 40), (1, 64, 576), (17, 40, 100), (33, 64, 300), (65, 70, 300)]
GPU_SHAPES = [*SHAPES, *product((1, 8, 16, 31, 64, 200, 2049), (1024, 4096), (576, 4096))]


def int8(*shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def check_w8a8(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, few: bool = False
) -> None:
    """The products alone, then with each set of scales, offset and bias, or with `few` with all of them."""
    x, weight = int8(rows, inputs).to(device), int8(outputs, inputs).to(device)
    op = ops.get("linear_w8a8")
    one = torch.ones(outputs, device=device)
    # float32 holds integers up to 2^24; beyond, both round the same int32 to it.
    exact = op.resolve(("triton", "reference"), x, weight, one, None, None, None, torch.float32)
    assert exact.name == "triton"
    oracle = (x.cpu().long() @ weight.cpu().long().T).to(torch.int32)
    got = exact.run(x, weight, one, None, None, None, torch.float32)
    assert torch.equal(got.cpu(), oracle.float())
    scale = torch.rand(outputs, device=device) / 1000
    x_scale = torch.rand(rows, 1, device=device)
    offset = torch.randint(-5000, 5000, (outputs,), dtype=torch.int32, device=device)
    bias = torch.randn(outputs, device=device).to(dtype)
    sets = ((x_scale, offset, bias), (x_scale, None, None), (None, offset, bias))
    for args in sets[:1] if few else sets:
        got = exact.run(x, weight, scale, *args, dtype)
        same(got, op.reference(x, weight, scale, *args, dtype))


def check_w8(rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = torch.randn(rows, inputs).to(dtype).to(device), int8(outputs, inputs).to(device)
    scale, bias = torch.rand(outputs, device=device) / 1000, torch.randn(outputs).to(dtype).to(device)
    op = ops.get("linear_w8")
    for last in (None, bias):
        args = (x, weight, scale, last)
        chosen = op.resolve(("triton", "reference"), *args)
        assert chosen.name == "triton"
        wide = op.reference(x.double(), weight, scale, None if last is None else last.double())
        got = chosen.run(*args)
        assert got.dtype == dtype
        bound = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
        torch.testing.assert_close(got.double(), wide, rtol=bound, atol=bound)


@pytest.mark.parametrize("shape, dtype", [(s, FLOATS[i % 3]) for i, s in enumerate(SHAPES)])
def test_products_agree_with_the_reference(shape, dtype, device):
    check_w8a8(*shape, dtype, device)
    check_w8(*shape, dtype, device)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS)
def test_products_agree_over_the_grid(dtype, device):
    for rows, hidden in product((1, 7, 33), (64, 576)):
        check_w8a8(rows, hidden, hidden, dtype, device, few=True)
        check_w8(rows, hidden, hidden, dtype, device)
    if dtype == torch.bfloat16:
        check_w8a8(256, 64, 4096, dtype, device, few=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_products_agree_on_a_gpu(dtype, device):
    for shape in GPU_SHAPES:
        check_w8a8(*shape, dtype, device)
        check_w8(*shape, dtype, device)


def test_extreme_products_do_not_overflow_or_round(device):
    x = torch.full((2, 4096), -128, dtype=torch.int8, device=device)
    weight = torch.full((16, 4096), -128, dtype=torch.int8, device=device)
    weight[:, 0] = 127
    one = torch.ones(16, device=device)
    offset = torch.full((16,), -(2**26) + 2**14, dtype=torch.int32, device=device)
    run = ops.get("linear_w8a8").implementations["triton"].run
    got = run(x, weight, one, None, offset, None, torch.float32)
    assert torch.equal(got, torch.full_like(got, float(-128 * 127)))


def test_leading_dimensions_and_rows_with_gaps(device):
    x, weight = int8(2, 3, 64).to(device), int8(32, 64).to(device)
    scale, x_scale = torch.rand(32, device=device), torch.rand(2, 3, 1, device=device)
    op = ops.get("linear_w8a8")
    for value, row_scale in ((x, x_scale), (int8(5, 80).to(device)[:, 16:], x_scale.flatten(0, 1)[:5])):
        args = (value, weight, scale, row_scale, None, None, torch.float32)
        same(op.implementations["triton"].run(*args), op.reference(*args))


def test_no_rows(device):
    args = (int8(0, 64).to(device), int8(32, 64).to(device), torch.ones(32, device=device))
    got = ops.get("linear_w8a8").implementations["triton"].run(*args, None, None, None, torch.float32)
    assert got.shape == (0, 32)
