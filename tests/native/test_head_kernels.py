"""Rotary kernels against the references: head sizes, ratios, partial rotation, pairs, norms and biases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, check

from piecework.native import library

pytestmark = pytest.mark.skipif(library() is None, reason="the library can't be built here")

shapes = st.tuples(
    st.integers(0, 9),  # tokens
    st.integers(1, 4),  # heads per head of k
    st.integers(1, 3),  # heads of k
    st.integers(1, 70).flatmap(lambda d: st.tuples(st.just(2 * d), st.integers(1, d))),  # size, half
)


def _table(tokens: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.rand(40, half) * 6
    return torch.randint(0, 40, (tokens,)), torch.cat((angle.cos(), angle.sin()), -1)


def _packed(tokens: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a longer tensor."""
    width = (heads + 2 * kv_heads) * size
    return torch.randn(tokens, width + 16).to(dtype)[:, 8 : 8 + width]


@settings(max_examples=40, deadline=None)
@given(shapes, st.sampled_from(DTYPES), st.booleans())
def test_rotary(shape: Any, dtype: torch.dtype, interleaved: bool) -> None:
    tokens, group, kv_heads, (size, half) = shape
    heads = group * kv_heads
    positions, cos_sin = _table(tokens, half)
    qkv = _packed(tokens, heads, kv_heads, size, dtype)
    q, k, _ = qkv.split((heads * size, kv_heads * size, kv_heads * size), -1)
    q, k = q.unflatten(1, (heads, size)), k.unflatten(1, (kv_heads, size))
    check("rotary", (positions, q, k, cos_sin, interleaved))
    check("rotary", (positions, q.contiguous(), k.contiguous(), cos_sin))


@settings(max_examples=40, deadline=None)
@given(shapes, st.sampled_from(DTYPES), st.booleans())
def test_split_and_rotate(shape: Any, dtype: torch.dtype, interleaved: bool) -> None:
    tokens, group, kv_heads, (size, half) = shape
    qkv = _packed(tokens, group * kv_heads, kv_heads, size, dtype)
    check("split_qkv_rope", (qkv, *_table(tokens, half), group * kv_heads, kv_heads, interleaved))


@settings(max_examples=40, deadline=None)
@given(shapes, st.sampled_from(DTYPES), st.booleans(), st.booleans(), st.booleans())
def test_split_norm_and_rotate(
    shape: Any, dtype: torch.dtype, q_bias: bool, k_bias: bool, interleaved: bool
) -> None:
    tokens, group, kv_heads, (size, half) = shape
    qkv = _packed(tokens, group * kv_heads, kv_heads, size, dtype)
    weights = [(torch.rand(size) + 0.5).to(dtype) for _ in range(2)]
    biases = [torch.randn(size).to(dtype) if there else None for there in (q_bias, k_bias)]
    fixed = (1e-6, group * kv_heads, kv_heads)
    check("split_qkv_rmsnorm_rope", (qkv, *_table(tokens, half), *weights, *fixed, *biases, interleaved))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
def test_head_sizes_of_models(size: int, dtype: torch.dtype) -> None:
    for tokens in (1, 7, 256, 533, 2049):
        qkv = torch.randn(tokens, 15 * size).to(dtype)
        table = _table(tokens, size // 2)
        check("split_qkv_rope", (qkv, *table, 9, 3))
        weights = [(torch.rand(size) + 0.5).to(dtype) for _ in range(2)]
        check("split_qkv_rmsnorm_rope", (qkv, *table, *weights, 1e-5, 9, 3))
