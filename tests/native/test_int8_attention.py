"""Attention over a cache of int8: the kernel equals the reference, and half the bytes are kept."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention_kernel import BOUNDS, paged_call, sequences

from piecework import ops
from piecework.kvcache import LayerShape, page_bytes
from piecework.native import library
from piecework.ops.attention_int8 import quantize_heads
from piecework.ops.cpu.attention import supports

OP = ops.get("paged_attention_int8")
KERNEL = OP.implementations["cpu"].run
WRITTEN = (3, 4, 5, 6, 7)


def int8_call(lengths: list[tuple[int, int]], **sizes: Any) -> tuple[Any, ...]:
    """The same call over a cache of random int8 and scales."""
    args = paged_call(lengths, **sizes)
    quantised = [quantize_heads(cache.flatten(0, 1)) for cache in args[4:6]]
    caches = [values.view(args[4].shape) for values, _ in quantised]
    scales = [by.view(args[4].shape[:3]) for _, by in quantised]
    return (*args[:4], *caches, *scales, *args[6:])


def check(args: tuple[Any, ...]) -> None:
    """Run the reference and the kernel, which must write the same bytes and near the same results."""
    if library() is None:
        pytest.skip("there is no C++ compiler")
    other = tuple(a.clone() if i in WRITTEN else a for i, a in enumerate(args))
    assert supports(*args[:8])
    OP.reference(*args)
    KERNEL(*other)
    bound = BOUNDS[args[0].dtype]
    torch.testing.assert_close(other[3], args[3], atol=bound, rtol=bound)
    for i in WRITTEN[1:]:
        assert torch.equal(other[i], args[i])
    assert not other[3][int(args[10][-1]) :].any()


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
def test_ratios_dims_and_pages(dtype: torch.dtype) -> None:
    """Decoding, prefill, a chunk, and a context that is cut into parts, in one batch."""
    grid = itertools.product([1, 3, 8], [64, 80, 128], [1, 16])
    for seed, (ratio, dim, page_size) in enumerate(grid):
        check(
            int8_call(
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


@settings(max_examples=25, deadline=None)
@given(
    lengths=sequences,
    kv_heads=st.integers(1, 3),
    ratio=st.sampled_from([1, 2, 7, 50]),
    dim=st.sampled_from([8, 24, 64]),
    page_size=st.sampled_from([1, 5, 16]),
    window=st.sampled_from([0, 1, 5, 100]),
)
def test_ragged_batches(
    lengths: list[tuple[int, int]], kv_heads: int, ratio: int, dim: int, page_size: int, window: int
) -> None:
    sizes = {"heads": kv_heads * ratio, "kv_heads": kv_heads, "dim": dim}
    check(int8_call(lengths, page_size=page_size, window=window, **sizes))


def test_it_is_close_to_attention_over_floats() -> None:
    floats = paged_call([(1, 300), (20, 50)], heads=4, kv_heads=2)
    # The cache as it was before, in both forms.
    rounded = int8_call([(1, 300), (20, 50)], heads=4, kv_heads=2)
    ops.get("paged_attention").reference(*floats)
    OP.reference(*rounded)
    assert 0 < (rounded[3] - floats[3]).square().mean().sqrt() < 0.01 * floats[3].std()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_key_that_is_not_finite_reaches_the_result_of_its_sequence_alone(value: float) -> None:
    args = int8_call([(1, 40), (1, 40)])
    args[1][0, 0, 3] = value
    KERNEL(*args)
    assert args[3][0].isnan().all() and args[3][1].isfinite().all()


def test_zeros_and_the_smallest_numbers_have_a_scale() -> None:
    x = torch.zeros(3, 1, 8)
    x[1, 0, 2], x[2, 0, 5] = 1e-40, -3.0
    values, scales = quantize_heads(x)
    assert scales.flatten().tolist()[0] == 0 and not values[0].any() and values[2, 0, 5] == -127
    assert values.float().mul(scales.float().unsqueeze(-1)).sub(x).abs().max() < 0.01


def test_other_calls_run_in_torch() -> None:
    args = int8_call([(1, 5), (3, 9)], dim=20)
    other = tuple(a.clone() if i in WRITTEN else a for i, a in enumerate(args))
    assert not supports(*args[:8])
    OP.reference(*args)
    KERNEL(*other)
    assert torch.equal(args[3], other[3])


@pytest.mark.parametrize("dim", [64, 128])
def test_it_takes_half_the_bytes(dim: int) -> None:
    layers = [LayerShape(3, dim)] * 2
    assert page_bytes(layers, 16, torch.int8) <= 0.52 * page_bytes(layers, 16, torch.bfloat16)
