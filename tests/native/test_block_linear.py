"""Weights in GGUF's blocks: packing loses nothing, and products are those of the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from piecework import ops
from piecework.native import library
from piecework.ops.block_linear import SIZES, kind_of, pack_blocks, quantize_blocks, unpack_blocks

OP = ops.get("linear_blocks")
needs_library = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
kinds = pytest.mark.parametrize("kind", list(SIZES))


def rows_in_file(kind: str, rows: int, inputs: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random rows as a GGUF file has them, uint8 [rows, bytes], and what the gguf package makes of them."""
    from gguf import quants

    weights = np.random.default_rng(seed).standard_normal((rows, inputs), dtype=np.float32)
    weights[0, :32] = 0
    cls = getattr(quants, kind)
    data = cls.quantize(weights)
    return torch.from_numpy(data), torch.from_numpy(cls.dequantize(data))


@kinds
@pytest.mark.parametrize("rows", [1, 8, 13])
def test_packed_weights_are_those_of_the_file(kind: str, rows: int) -> None:
    data, weights = rows_in_file(kind, rows, 96)
    packed = pack_blocks(data, kind)
    assert kind_of(packed) == kind and packed.shape == (-(-rows // 8), 3, 8 * SIZES[kind])
    torch.testing.assert_close(unpack_blocks(packed, rows), weights, atol=1e-6, rtol=1e-6)
    ids = torch.tensor([rows - 1, 0, rows // 2])
    found = torch.ops.piecework.embedding_blocks(ids, packed, torch.float32)
    torch.testing.assert_close(found, weights[ids], atol=1e-6, rtol=1e-6)


def test_other_tensors_are_no_packed_weights() -> None:
    with pytest.raises(ValueError, match=r"\[1, 2, 3\] is no weight in blocks"):
        kind_of(torch.zeros(1, 2, 3, dtype=torch.uint8))


@kinds
def test_the_reference_is_the_product_with_rounded_activations(kind: str) -> None:
    data, weights = rows_in_file(kind, 11, 128)
    x = torch.randn(5, 128)
    q, scale = quantize_blocks(x)
    rounded = (q * scale.unsqueeze(-1)).flatten(1)
    assert (rounded - x).abs().max() <= scale.max() / 2 + 1e-6
    y = OP.reference(x, pack_blocks(data, kind), 11, None)
    torch.testing.assert_close(y, rounded @ weights.t(), atol=1e-4, rtol=1e-4)


@needs_library
@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(list(SIZES)),
    rows=st.integers(0, 11),
    outputs=st.integers(1, 70),
    blocks=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    bias=st.booleans(),
)
def test_the_kernel_equals_the_reference(
    kind: str, rows: int, outputs: int, blocks: int, dtype: torch.dtype, bias: bool
) -> None:
    packed = pack_blocks(rows_in_file(kind, outputs, 32 * blocks, seed=outputs)[0], kind)
    x = torch.randn(rows, 32 * blocks).to(dtype)
    x[: rows // 2, :32] = 0
    b = torch.randn(outputs).to(dtype) if bias else None
    assert OP.resolve(("cpu", "reference"), x, packed, outputs, b).name == "cpu"
    y = torch.ops.piecework.linear_blocks(x, packed, outputs, b)
    bound = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(y, OP.reference(x, packed, outputs, b), atol=10 * bound, rtol=bound)
    if rows:
        assert torch.equal(y[-1:], torch.ops.piecework.linear_blocks(x[-1:], packed, outputs, b))


@needs_library
@kinds
def test_extreme_weights_and_activations(kind: str) -> None:
    data, _ = rows_in_file(kind, 8, 64)
    head = 4 if kind == "Q4_1" else 2
    blocks = data.view(8, 2, -1)
    for value, row in ((0x80, 0), (0x7F, 1), (0xFF, 2), (0x00, 3)):
        blocks[row, :, head:] = value
    packed = pack_blocks(data, kind)
    x = torch.tensor([1.0, -1.0]).repeat(3, 32)
    x[1] = 1.0
    x[2] = -1.0
    y = torch.ops.piecework.linear_blocks(x, packed, 8, None)
    torch.testing.assert_close(y, OP.reference(x, packed, 8, None), atol=1e-3, rtol=1e-4)


@needs_library
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_reaches_the_result(bad: float) -> None:
    packed = pack_blocks(rows_in_file("Q4_1", 9, 64)[0], "Q4_1")
    x = torch.randn(2, 64)
    x[1, 40] = bad
    for run in (OP.reference, OP.implementations["cpu"].run):
        y = run(x, packed, 9, None)
        assert y[0].isfinite().all() and not y[1].isfinite().any()
