"""Kernels that work row by row against the ops' references."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from kernel_calls import FLOATS, NORMS, ROWWISE, compare, rowwise, to

import piecework.ops as ops

GRID = list(product((1, 7, 33), (64, 576), FLOATS))
# Each value of each dimension; in the default run each op has one of these.
FEW = [(1, 576, torch.bfloat16), (7, 576, torch.float32), (33, 64, torch.float16)]


@pytest.mark.parametrize(
    "name, tokens, hidden, dtype", [(name, *FEW[i % len(FEW)]) for i, name in enumerate(ROWWISE)]
)
def test_rows_agree_with_the_reference(name, tokens, hidden, dtype, device):
    compare(name, rowwise(name, tokens, hidden, dtype, offset=tokens == 7), device)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWWISE)
def test_rows_agree_over_the_grid(name, device):
    for tokens, hidden, dtype in GRID:
        compare(name, rowwise(name, tokens, hidden, dtype), device)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["add_rms_norm_dynamic_quant", "silu_mul_quant"])
def test_many_wide_rows_agree(name, device):
    """Of ops that hold the work of the others."""
    compare(name, rowwise(name, 256, 4096, torch.bfloat16), device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ROWWISE)
def test_rows_agree_on_a_gpu(name, dtype, device):
    for tokens, hidden in product((1, 7, 256, 533, 2049), (64, 576, 3392, 4096, 8192)):
        compare(name, rowwise(name, tokens, hidden, dtype, offset=tokens == 7), device)


@pytest.mark.parametrize("name", NORMS)
def test_norms_of_rows_with_gaps(name, device):
    args = rowwise(name, 6, 40, torch.float32)
    strided = (torch.randn(6, 100)[:, 30:70], *args[1:])
    assert not strided[0].is_contiguous()
    compare(name, strided, device)


def test_norms_of_heads_inside_a_packed_projection(device):
    packed = torch.randn(5, 12, 16)
    compare("rms_norm", (packed[:, 3:7], torch.randn(16), 1e-6), device)
    compare("rms_norm", (packed[1:4, :, 2:10].transpose(0, 1), torch.randn(8), 1e-6), device)
    compare("dynamic_quantize", (packed[:, 3:7],), device)
    compare("add_rms_norm", (packed[:, 3:7], torch.randn(5, 4, 16), torch.randn(16), 1e-6), device)


def test_the_norm_with_a_weight_of_another_dtype_has_the_wider_one(device):
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    compare("rms_norm", (x, torch.randn(64), 1e-6), device)
    fused = tuple(to(a, device) for a in (x, torch.randn(64), 1e-6, torch.ones(1), torch.ones(1), None))
    assert ops.get("rms_norm_quant").resolve(("triton", "reference"), *fused).name == "reference"


@pytest.mark.parametrize("name", ["dynamic_quantize", "silu_mul_dynamic_quant", "rms_norm_dynamic_quant"])
def test_rows_of_zeros_and_rows_that_are_not_finite(name, device):
    args = rowwise(name, 5, 64, torch.float32)
    x = args[0]
    x[1] = 0
    x[2, 5], x[3, 7] = float("nan"), float("inf")
    op = ops.get(name)
    there = tuple(to(a, device) for a in args)
    q, scale = op.implementations["triton"].run(*there)
    expected_q, expected_scale = op.reference(*there)
    torch.testing.assert_close(scale, expected_scale, equal_nan=True, rtol=1e-5, atol=1e-7)
    assert torch.equal(q[1:4], expected_q[1:4]) and not q[1].any()


def test_halves_round_to_even_and_the_range_is_clamped(device):
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 300.0, -128.5, -1e30]], device=device)
    one = torch.ones(1, device=device)
    got = ops.get("quantize").implementations["triton"].run(x, one, one, None)
    assert got.tolist() == [[0, 2, 2, 0, -2, 126, 127, 127, -128, -128]]


@pytest.mark.parametrize("name", ["add_rms_norm", "silu_and_mul"])
def test_no_rows(name, device):
    compare(name, rowwise(name, 0, 64, torch.float32), device)


def test_what_the_kernels_do_not_take_goes_elsewhere(device, monkeypatch):
    op = ops.get("rms_norm")
    order = ("triton", "reference")
    x = torch.randn(2, 64, device=device)
    assert op.resolve(order, x, x[0], 1e-5).name == "triton"
    wide = torch.randn(1, 20000, device=device)
    assert op.resolve(order, wide, wide[0], 1e-5).name == "reference"
    assert op.resolve(order, x.double(), x[0].double(), 1e-5).name == "reference"
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert op.resolve(order, x.cpu(), x[0].cpu(), 1e-5).name == "reference"
