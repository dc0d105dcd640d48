"""Weights in GGUF's blocks: packing loses nothing, and products are those of the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf_blocks import random_blocks, scale_places
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from piecework import ops
from piecework.native import library
from piecework.ops.block_kinds import KINDS
from piecework.ops.block_linear import quantize_blocks
from piecework.ops.block_packing import inputs_of, kind_of, pack_blocks, unpack_blocks

OP = ops.get("linear_blocks")
needs_library = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
kinds = pytest.mark.parametrize("kind", list(KINDS))


def rows_in_file(kind: str, rows: int, blocks: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random rows of so many blocks as a GGUF file has them, and what the gguf package makes of them.

    Bytes are random but for d and m, of which the rows' weights have a size near 1.
    """
    from gguf import quants

    raw = random_blocks(np.random.default_rng(seed), kind, (rows, blocks * KINDS[kind].channels))
    data = raw.reshape(rows, blocks, -1)
    most = 2 ** KINDS[kind].bits * {"Q4_K": 64, "Q5_K": 64, "Q6_K": 128}.get(kind, 1)
    for number, place in enumerate(scale_places(kind)):
        halves = data[..., place : place + 2].copy().view(np.float16)
        size = most if number == 0 else 64 if kind in ("Q4_K", "Q5_K") else 1
        data[..., place : place + 2] = (halves / size).astype(np.float16).view(np.uint8)
    data[0, 0] = 0
    return torch.from_numpy(raw), torch.from_numpy(getattr(quants, kind).dequantize(raw))


@kinds
@pytest.mark.parametrize("rows", [1, 8, 13])
def test_packed_weights_are_those_of_the_file(kind: str, rows: int) -> None:
    data, weights = rows_in_file(kind, rows, 3)
    packed = pack_blocks(data, kind)
    assert kind_of(packed).name == kind and packed.shape == (-(-rows // 8), 3, KINDS[kind].size)
    assert inputs_of(packed) == weights.shape[1]
    assert torch.equal(unpack_blocks(packed, rows), weights)
    ids = torch.tensor([rows - 1, 0, rows // 2])
    for embed in (ops.get("embedding_blocks").reference, torch.ops.piecework.embedding_blocks):
        assert torch.equal(embed(ids, packed, torch.float32), weights[ids])


@kinds
def test_packing_in_steps_is_packing_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, _ = rows_in_file(kind, 29, 2)
    whole = pack_blocks(data, kind)
    monkeypatch.setattr("piecework.ops.block_packing._STEP", 16 * 2 * KINDS[kind].channels)
    assert torch.equal(pack_blocks(data, kind), whole)


@pytest.mark.parametrize(("kind", "most"), [("Q4_K", 1.03), ("Q5_K", 1.025)])
def test_packed_weights_are_as_large_as_the_file(kind: str, most: float) -> None:
    """Scales of 6 bits take a byte; all other kinds take the file's bytes."""
    for name, found in KINDS.items():
        larger = found.size / (8 * found.file_size)
        assert larger <= most if name == kind else larger == 1 or name in ("Q4_K", "Q5_K")


def test_other_tensors_are_no_packed_weights() -> None:
    with pytest.raises(ValueError, match=r"\[1, 2, 3\] is no weight in blocks"):
        kind_of(torch.zeros(1, 2, 3, dtype=torch.uint8))


@kinds
def test_the_reference_is_the_product_with_rounded_activations(kind: str) -> None:
    data, weights = rows_in_file(kind, 11, 4)
    x = torch.randn(5, weights.shape[1])
    q, scale = quantize_blocks(x)
    rounded = (q * scale.unsqueeze(-1)).flatten(1)
    assert (rounded - x).abs().max() <= scale.max() / 2 + 1e-6
    y = OP.reference(x, pack_blocks(data, kind), 11, None)
    expected = rounded.double() @ weights.double().t()
    torch.testing.assert_close(y.double(), expected, atol=2e-4, rtol=1e-4)


@needs_library
@settings(max_examples=120, deadline=None)
@given(
    kind=st.sampled_from(list(KINDS)),
    rows=st.integers(0, 11),
    outputs=st.integers(1, 70),
    blocks=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_kernel_equals_the_reference(
    kind: str, rows: int, outputs: int, blocks: int, dtype: torch.dtype, bias: bool, seed: int
) -> None:
    packed = pack_blocks(rows_in_file(kind, outputs, blocks, seed)[0], kind)
    x = torch.randn(rows, inputs_of(packed)).to(dtype)
    x[: rows // 2, :32] = 0
    b = torch.randn(outputs).to(dtype) if bias else None
    assert OP.resolve(("cpu", "reference"), x, packed, outputs, b).name == "cpu"
    y = torch.ops.piecework.linear_blocks(x, packed, outputs, b)
    bound = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(y, OP.reference(x, packed, outputs, b), atol=10 * bound, rtol=bound)
    if rows:
        assert torch.equal(y[-1:], torch.ops.piecework.linear_blocks(x[-1:], packed, outputs, b))


@needs_library
@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(st.tuples(st.sampled_from(list(KINDS)), st.integers(1, 40)), min_size=2, max_size=3),
    rows=st.integers(0, 6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    bias=st.booleans(),
)
def test_parts_of_several_kinds_are_side_by_side(
    parts: list[tuple[str, int]], rows: int, dtype: torch.dtype, bias: bool
) -> None:
    op = ops.get("linear_block_parts")
    packed = [pack_blocks(rows_in_file(k, n, 512 // KINDS[k].channels, n)[0], k) for k, n in parts]
    outputs, kinds_ = [n for _, n in parts], [p.shape[2] for p in packed]
    x = torch.randn(rows, 512).to(dtype)
    b = torch.randn(sum(outputs)).to(dtype) if bias else None
    flat = torch.cat([p.flatten() for p in packed])
    assert op.resolve(("cpu", "reference"), x, flat, outputs, kinds_, b).name == "cpu"
    y = torch.ops.piecework.linear_block_parts(x, flat, outputs, kinds_, b)
    biases = b.split(outputs) if b is not None else [None] * len(parts)
    each = [OP.implementations["cpu"].run(x, *part) for part in zip(packed, outputs, biases, strict=True)]
    assert torch.equal(y, torch.cat(each, -1))
    bound = 1e-4 if dtype == torch.float32 else 2e-2
    expected = op.reference(x, flat, outputs, kinds_, b)
    torch.testing.assert_close(y, expected, atol=20 * bound, rtol=2 * bound)


@needs_library
@kinds
@pytest.mark.parametrize("value", [0x00, 0x0F, 0x7F, 0x80, 0xF0, 0xFF])
def test_extreme_weights_and_activations(kind: str, value: int) -> None:
    """All bytes but d and m: weights, and scales of 6 and 8 bits, at the ends of what they can be."""
    data, _ = rows_in_file(kind, 8, 2)
    blocks = data.view(8, 2, -1)
    kept = [blocks[1:, :, p : p + 2].clone() for p in scale_places(kind)]
    blocks[1:] = value
    for place, halves in zip(scale_places(kind), kept, strict=True):
        blocks[1:, :, place : place + 2] = halves
    packed = pack_blocks(data, kind)
    x = torch.tensor([1.0, -1.0]).repeat(3, inputs_of(packed) // 2)
    x[1] = 1.0
    x[2] = -1.0
    y = torch.ops.piecework.linear_blocks(x, packed, 8, None)
    torch.testing.assert_close(y, OP.reference(x, packed, 8, None), atol=1e-3, rtol=1e-4)


@needs_library
@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_reaches_the_result(kind: str, bad: float) -> None:
    packed = pack_blocks(rows_in_file(kind, 9, 2)[0], kind)
    x = torch.randn(2, inputs_of(packed))
    x[1, 40] = bad
    for run in (OP.reference, OP.implementations["cpu"].run):
        y = run(x, packed, 9, None)
        assert y[0].isfinite().all() and not y[1].isfinite().any()
