"""Rows of a table, and of weights in blocks, are the reference's bit for bit; nothing else is read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from piecework import ops
from piecework.native import library
from piecework.ops.block_kinds import KINDS
from piecework.ops.int8_panels import lay_out

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IDS = torch.tensor([3, 0, 20, 7, 7, 12])


def packed_weights(kind: str, groups: int, blocks: int) -> Tensor:
    """Random weights in blocks whose scales are numbers of a usual size."""
    packed = torch.randint(0, 256, (groups, blocks, KINDS[kind].size), dtype=torch.uint8)
    head = KINDS[kind].head
    packed[..., :head] = torch.randn(groups, blocks, head // 2).half().view(torch.uint8)
    return packed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 6, 900])
def test_rows_of_a_table(dtype: torch.dtype, rows: int) -> None:
    op = ops.get("embedding")
    wide = torch.randn(21, 200).to(dtype)
    ids = IDS.repeat(150)[:rows]
    for weight in (wide, wide[:, 3:36]):
        assert op.resolve(("cpu", "reference"), ids, weight).name == "cpu"
        assert torch.equal(torch.ops.piecework.embedding(ids, weight), weight[ids])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", list(KINDS))
def test_rows_in_blocks(kind: str, dtype: torch.dtype) -> None:
    op = ops.get("embedding_blocks")
    packed = packed_weights(kind, 3, 2)
    assert op.resolve(("cpu", "reference"), IDS, packed, dtype).name == "cpu"
    assert torch.equal(
        torch.ops.piecework.embedding_blocks(IDS, packed, dtype), op.reference(IDS, packed, dtype)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_int8(dtype: torch.dtype) -> None:
    op = ops.get("embedding_int8")
    for size in (1, 33, 64, 128):
        weight, scale = torch.randint(-128, 128, (21, size), dtype=torch.int8), torch.rand(21)
        wanted = op.reference(IDS, weight, scale, dtype)
        assert op.resolve(("cpu", "reference"), IDS, weight, scale, dtype).name == "cpu"
        assert torch.equal(op.implementations["cpu"].run(IDS, weight, scale, dtype), wanted)
        if size % 64 == 0:
            assert torch.equal(op.implementations["cpu"].run(IDS, lay_out(weight), scale, dtype), wanted)
            assert torch.equal(op.reference(IDS, lay_out(weight), scale, dtype), wanted)


def test_an_id_out_of_range_gives_nan_and_nothing_of_the_memory() -> None:
    ids = torch.tensor([2**62, 1, -1, 24])
    for dtype in DTYPES:
        found = torch.ops.piecework.embedding(ids, torch.ones(24, 5, dtype=dtype))
        blocks = torch.ops.piecework.embedding_blocks(ids, packed_weights("Q4_0", 3, 1), dtype)
        int8 = torch.ops.piecework.embedding_int8(
            ids, torch.ones(24, 5, dtype=torch.int8), torch.ones(24), dtype
        )
        for rows in (found, blocks, int8):
            assert rows.isnan().all(1).tolist() == [True, False, True, True]
