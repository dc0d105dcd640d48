"""Decode attention over a paged cache against the op's reference."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from kernel_calls import FLOATS, to

import piecework.ops as ops
from piecework.ops.triton import attention

BOUND = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def decode_args(
    contexts: list[int],
    *,
    heads: int = 6,
    kv_heads: int = 2,
    dim: int = 64,
    page: int = 4,
    window: int = 0,
    padding: int = 0,
    spare_pages: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple:
    """One row for each of `contexts`, `padding` rows behind, `spare_pages` unused columns of the table."""
    counts = [-(-c // page) for c in contexts]
    pool = (torch.randperm(sum(counts)) + 1).int()
    table = torch.zeros(len(contexts), max(counts) + spare_pages, dtype=torch.int32)
    slots = torch.zeros(len(contexts) + padding, dtype=torch.int32)
    for b, (count, pages) in enumerate(zip(counts, pool.split(counts), strict=True)):
        table[b, :count] = pages
        last = contexts[b] - 1
        slots[b] = pages[last // page] * page + last % page
    rows = len(contexts) + padding
    packed = torch.randn(rows, heads + 2 * kv_heads, dim).to(dtype)
    q, k, v = packed.split((heads, kv_heads, kv_heads), 1)
    out = torch.full((rows, heads, dim), float("nan"), dtype=dtype)
    caches = torch.randn(2, sum(counts) + 1, kv_heads, page, dim).to(dtype)
    caches[:, 0] = float("nan")  # the dummy page, which nothing may read
    starts = torch.arange(len(contexts) + 1, dtype=torch.int32)
    lengths = torch.tensor(contexts, dtype=torch.int32)
    return (q, k, v, out, *caches, slots, table, starts, lengths, 1, dim**-0.5, window)


def check(args: tuple, device: torch.device) -> None:
    op = ops.get("paged_attention")
    mine, theirs = ([to(a, device) for a in args] for _ in range(2))
    mine[3:6], theirs[3:6] = ([t.clone() for t in part[3:6]] for part in (mine, theirs))
    chosen = op.resolve(("triton", "reference"), *mine)
    assert chosen.name == "triton"
    chosen.run(*mine)
    op.reference(*theirs)
    bound = BOUND[args[0].dtype]
    torch.testing.assert_close(mine[3], theirs[3], atol=bound, rtol=bound)
    for got, expected in zip(mine[4:6], theirs[4:6], strict=True):
        assert torch.equal(got[1:], expected[1:])


CASES = [
    {"contexts": [1]},
    {"contexts": [1, 5, 40, 33], "window": 5, "padding": 2},
    {"contexts": [300, 2], "heads": 4, "kv_heads": 1, "page": 16, "dtype": torch.float16},
    {
        "contexts": [257, 16, 1],
        "heads": 2,
        "kv_heads": 2,
        "page": 16,
        "dtype": torch.bfloat16,
        "spare_pages": 9,
    },
    {"contexts": [70], "heads": 9, "kv_heads": 3, "dim": 96, "page": 8, "window": 64},
    {"contexts": [65, 64, 63], "heads": 2, "kv_heads": 1, "dim": 256, "page": 16, "dtype": torch.bfloat16},
    {"contexts": [90], "heads": 5, "kv_heads": 1, "dim": 80, "page": 1, "dtype": torch.float16},
]


@pytest.mark.parametrize("case", CASES)
def test_decode_agrees_with_the_reference(case, device):
    check(decode_args(**case), device)


def test_the_context_is_split_and_combined(device, monkeypatch):
    seen = []

    def parts(*args: int) -> int:
        seen.append(args)
        return 4

    monkeypatch.setattr(attention, "_parts", parts)
    for case in CASES[::2]:
        check(decode_args(**case), device)
    assert len(seen) == len(CASES[::2])


def test_parts_depend_on_shapes_and_fill_the_processors():
    assert attention._parts(1, 4096, 132) == 32
    assert attention._parts(8, 4096, 132) == 32
    assert attention._parts(8, 512, 132) == 4
    assert attention._parts(64 * 8, 4096, 132) == 1
    assert attention._parts(40, 4096, 132) == 4
    assert attention._parts(1, 1, 132) == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS)
def test_decode_agrees_over_the_grid(dtype, device):
    for dim, (heads, kv_heads), window in product((64, 128), ((4, 4), (9, 3), (8, 1)), (0, 20)):
        contexts = [1, 17, 40]  # CASES have longer ones
        args = decode_args(
            contexts, heads=heads, kv_heads=kv_heads, dim=dim, page=16, window=window, padding=1, dtype=dtype
        )
        check(args, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_decode_agrees_on_a_gpu(dtype, device):
    batches = ([4000], [1, 17, 130, 64, 2048, 5], [600] * 64)
    for dim, (heads, kv_heads), window in product((64, 96, 128, 256), ((4, 4), (9, 3), (32, 8)), (0, 100)):
        for contexts in batches:
            sizes = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "page": 16}
            check(decode_args(contexts, window=window, padding=3, dtype=dtype, **sizes), device)


def test_a_sequence_without_tokens_gets_zeros_and_writes_nothing(device):
    args = [to(a, device) for a in decode_args([9, 3])]
    args[9] = torch.tensor([9, 0], dtype=torch.int32, device=device)
    before = args[4].clone()
    ops.get("paged_attention").implementations["triton"].run(*args)
    assert args[3][0].any() and not args[3][1].any()
    changed = (args[4] != before)[1:].flatten(1).any(1).sum()  # pages, without the dummy
    assert changed == 1


def test_prefill_goes_elsewhere(device):
    args = [to(a, device) for a in decode_args([9, 3])]
    args[10] = 2
    assert ops.get("paged_attention").resolve(("triton", "cuda"), *args).name == "cuda"
