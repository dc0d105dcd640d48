"""The CPU's attention kernel equals the reference, and it is what runs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from piecework import ops
from piecework.native import library
from piecework.ops.cpu.attention import supports

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
OP = ops.get("paged_attention")
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def paged_call(
    lengths: list[tuple[int, int]],
    *,
    heads: int = 3,
    kv_heads: int = 1,
    dim: int = 64,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    padding: int = 0,
    seed: int = 0,
) -> tuple[Any, ...]:
    """A call for sequences of (query rows, context), q, k and v being parts of one tensor, as in a model."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-context // page_size) for _, context in lengths]
    pool = (torch.randperm(sum(counts), generator=generator) + 1).to(torch.int32)
    table = torch.zeros(len(lengths), max(1, *counts, 1), dtype=torch.int32)
    slots = [0] * sum(n for n, _ in lengths)
    starts = [0]
    for b, (pages, (queries, context)) in enumerate(zip(pool.split(counts), lengths, strict=True)):
        table[b, : len(pages)] = pages
        for i in range(min(queries, context)):
            at = context - queries + i
            slots[starts[b] + i] = int(table[b, at // page_size]) * page_size + at % page_size
        starts.append(starts[b] + queries)
    rows = starts[-1] + padding
    sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
    qkv = torch.randn(rows, sum(sizes), generator=generator).to(dtype)
    qkv[starts[-1] :] = float("nan")
    q, k, v = (part.view(rows, -1, dim) for part in qkv.split(sizes, -1))
    shape = (sum(counts) + 1, kv_heads, page_size, dim)
    caches = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]
    index = [torch.tensor(x, dtype=torch.int32) for x in (slots + [0] * padding, starts)]
    contexts = torch.tensor([c for _, c in lengths], dtype=torch.int32)
    longest = max(n for n, _ in lengths)
    out = torch.full((rows, heads, dim), float("nan"), dtype=dtype)
    return (q, k, v, out, *caches, index[0], table, index[1], contexts, longest, dim**-0.5, window)


def check(args: tuple[Any, ...]) -> None:
    """Run the reference and the kernel, which must write the same caches and results."""
    other = tuple(a.clone() if i in (3, 4, 5) else a for i, a in enumerate(args))
    assert supports(*args[:6])
    OP.reference(*args)
    assert OP.resolve(("cpu",), *other).run(*other) is None
    bound = BOUNDS[args[0].dtype]
    torch.testing.assert_close(other[3], args[3], atol=bound, rtol=bound)
    assert torch.equal(other[4], args[4]) and torch.equal(other[5], args[5])
    assert not other[3][int(args[8][-1]) :].any()


GRID = list(itertools.product([1, 3, 4, 8], [64, 80, 96, 128, 256], [1, 16, 64], list(BOUNDS)))


@pytest.mark.parametrize("index", range(5))
def test_ratios_dims_pages_and_types(index: int) -> None:
    """Decoding, prefill, a chunk, and a context that is cut into parts, in one batch."""
    for seed, (ratio, dim, page_size, dtype) in enumerate(GRID[index::5]):
        check(
            paged_call(
                [(1, 1), (1, 70), (1, 600), (19, 19), (9, 40)],
                heads=2 * ratio,
                kv_heads=2,
                dim=dim,
                page_size=page_size,
                dtype=dtype,
                window=(0, 33)[seed % 2],
                padding=seed % 3,
                seed=seed,
            )
        )


sequences = st.lists(
    st.integers(1, 150).flatmap(lambda c: st.tuples(st.integers(1, c), st.just(c))), min_size=1, max_size=5
)


@settings(max_examples=40, deadline=None)
@given(
    lengths=sequences,
    kv_heads=st.integers(1, 3),
    ratio=st.sampled_from([1, 2, 7, 50]),
    dim=st.sampled_from([8, 24, 64]),
    page_size=st.sampled_from([1, 5, 16]),
    window=st.sampled_from([0, 1, 5, 100]),
    padding=st.integers(0, 2),
)
def test_ragged_batches(
    lengths: list[tuple[int, int]],
    kv_heads: int,
    ratio: int,
    dim: int,
    page_size: int,
    window: int,
    padding: int,
) -> None:
    check(
        paged_call(
            lengths,
            heads=kv_heads * ratio,
            kv_heads=kv_heads,
            dim=dim,
            page_size=page_size,
            window=window,
            padding=padding,
        )
    )


def test_a_long_prefill_over_many_keys() -> None:
    check(paged_call([(20, 4500)], heads=2, kv_heads=1))


def test_a_sequence_without_tokens_gives_zero() -> None:
    args = paged_call([(1, 0), (1, 3)])
    OP.implementations["cpu"].run(*args)
    assert not args[3][0].any() and args[3][1].isfinite().all()


def test_a_result_does_not_depend_on_what_runs_beside_it_nor_on_threads() -> None:
    alone = paged_call([(1, 700)])
    OP.implementations["cpu"].run(*alone)
    q, k, v, out, keys, values, slots, table, starts, contexts, *rest = paged_call([(1, 700)])
    two = torch.cat((torch.zeros_like(q), q)), torch.cat((k, k)), torch.cat((v, v))
    slots, starts = torch.cat((slots * 0, slots)), torch.tensor([0, 1, 2])
    table, contexts = torch.cat((table * 0, table)), torch.tensor([1, 700])
    out = torch.cat((out, out))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        OP.implementations["cpu"].run(*two, out, keys, values, slots, table, starts, contexts, *rest)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(out[1], alone[3][0])


def test_a_value_that_is_not_finite_reaches_the_result() -> None:
    args = paged_call([(1, 40), (1, 40)])
    args[0][0, 1, 3] = float("nan")
    OP.implementations["cpu"].run(*args)
    assert args[3][0, 1].isnan().all() and args[3][0, 0].isfinite().all() and args[3][1].isfinite().all()


@pytest.mark.parametrize("change", ["double", "head_dim", "gap"])
def test_other_calls_run_in_torch(change: str) -> None:
    dim = 20 if change == "head_dim" else 16
    args = list(paged_call([(1, 5), (3, 9)], dim=dim))
    if change == "double":
        args[:6] = [a.double() for a in args[:6]]
    elif change == "gap":
        args[0] = torch.cat((args[0], args[0]), -1)[..., :dim]
    assert not supports(*args[:6])
    other = [a.clone() if i in (3, 4, 5) else a for i, a in enumerate(args)]
    OP.reference(*args)
    OP.implementations["cpu"].run(*other)
    torch.testing.assert_close(other[3], args[3], atol=2e-5, rtol=1e-4)
