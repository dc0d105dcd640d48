"""The kernel from the packed projection to queries and keys, against the ops' references."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from kernel_calls import FLOATS, compare, same, to

import piecework.ops as ops

# tokens, query heads, key heads, head_dim, channels that turn, interleaved
CASES = [
    (1, 4, 4, 64, 64, False),
    (2, 9, 3, 64, 64, True),
    (3, 8, 1, 96, 96, False),
    (2, 6, 2, 96, 32, True),
    (1, 16, 8, 128, 64, False),
    (1, 2, 1, 256, 256, False),
]


def split_args(case: tuple, dtype: torch.dtype) -> tuple:
    tokens, heads, kv_heads, dim, turning, interleaved = case
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    angle = torch.arange(50.0)[:, None] * torch.rand(turning // 2)
    positions = torch.randint(0, 50, (tokens,))
    return (qkv, positions, torch.cat((angle.cos(), angle.sin()), -1), heads, kv_heads, interleaved)


def norm_args(case: tuple, dtype: torch.dtype, biased: bool) -> tuple:
    *first, heads, kv_heads, interleaved = split_args(case, dtype)
    q_weight, k_weight, q_bias, k_bias = torch.randn(4, case[3]).to(dtype)
    bias = (q_bias, k_bias) if biased else (None, None)
    return (*first, q_weight, k_weight, 1e-6, heads, kv_heads, *bias, interleaved)


def rotary_args(case: tuple, dtype: torch.dtype) -> tuple:
    qkv, positions, table, heads, kv_heads, interleaved = split_args(case, dtype)
    q, k, _ = qkv.view(case[0], -1, case[3]).split((heads, kv_heads, kv_heads), 1)
    return (positions, q, k, table, interleaved)


def check(case: tuple, dtype: torch.dtype, device: torch.device) -> None:
    compare("split_qkv_rope", split_args(case, dtype), device)
    compare("split_qkv_rmsnorm_rope", norm_args(case, dtype, biased=case[0] % 2 == 1), device)
    compare("rotary", rotary_args(case, dtype), device)


@pytest.mark.parametrize("case, dtype", [(c, FLOATS[i % 3]) for i, c in enumerate(CASES)])
def test_heads_agree_with_the_reference(case, dtype, device):
    check(case, dtype, device)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS)
def test_heads_agree_over_the_grid(dtype, device):
    # Of hidden sizes 64 and 576.
    for tokens, heads in product((1, 7, 33), ((1, 1), (9, 3))):
        check((tokens, *heads, 64, 64, False), dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_heads_agree_on_a_gpu(dtype, device):
    for tokens, case in product((1, 7, 256, 533, 2049), CASES):
        check((tokens, *case[1:]), dtype, device)


def test_results_share_no_memory_with_their_source(device):
    qkv, *rest = split_args(CASES[0], torch.float32)
    qkv, rest = qkv.to(device), [r.to(device) if isinstance(r, torch.Tensor) else r for r in rest]
    before = qkv.clone()
    for out in torch.ops.piecework.split_qkv_rope(qkv, *rest):
        assert out.is_contiguous()
        out.zero_()
    assert torch.equal(qkv, before)


def test_a_projection_with_gaps_between_its_rows(device):
    qkv, *rest = split_args(CASES[1], torch.float32)
    wide = torch.empty_strided(qkv.shape, (qkv.shape[1] + 8, 1)).copy_(qkv)
    op = ops.get("split_qkv_rope")
    there = [to(a, device) for a in (wide, *rest)]
    expected = op.reference(there[0].contiguous(), *there[1:])
    for one, other in zip(op.implementations["triton"].run(*there), expected, strict=True):
        same(one, other)
