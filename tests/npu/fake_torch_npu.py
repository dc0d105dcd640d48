"""The functions of torch_npu that are used, in plain torch, with the signatures of the real ones.

What each computes is what torch_npu's documentation (torch_npu/_op_plugin_docs.py in the wheel) says. A
test compares the signatures with released wheels; arguments that nobody here gives are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

TYPES = [torch.float16, torch.bfloat16]
"""What most of the real functions take; a test adds float32, to compare results closely."""


def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    assert gamma.dtype == self.dtype
    wide = self.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * rstd).to(self.dtype) * gamma, rstd


def npu_add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    return (*npu_rms_norm(x1 + x2, gamma, epsilon), x1 + x2)


def npu_add_rms_norm_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    scales1: Tensor,
    zero_points1: Tensor | None,
    beta: Tensor | None = None,
    scales2: Tensor | None = None,
    zero_points2: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-6,
    div_mode: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    assert x1.dtype in TYPES and div_mode and scales1.shape == gamma.shape
    y, _, total = npu_add_rms_norm(x1, x2, gamma, epsilon)
    y = y.float() / scales1
    if zero_points1 is not None:
        assert zero_points1.dtype == torch.int32 and zero_points1.shape == gamma.shape
        y = y + zero_points1
    return _int8(y), torch.full_like(y, -77, dtype=torch.int8), total


def npu_add_rms_norm_dynamic_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    *,
    smooth_scale1: Tensor | None = None,
    smooth_scale2: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    y, _, total = npu_add_rms_norm(x1, x2, gamma, epsilon)
    q, scale = npu_dynamic_quant(y)
    return q, torch.full((1,), -77, dtype=torch.int8), total, scale, torch.full((1,), math.nan)


def npu_quantize(
    self: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    dtype: torch.dtype,
    axis: int = 1,
    div_mode: bool = True,
) -> Tensor:
    assert dtype == torch.qint8
    if not div_mode:  # then zero points look like the scales
        assert axis == -1
        assert zero_points is None or (zero_points.dtype, zero_points.shape) == (scales.dtype, scales.shape)
    y = self.float() / scales if div_mode else self.float() * scales
    return _int8(y if zero_points is None else y + zero_points)


def npu_dynamic_quant(
    input: Tensor, *, smooth_scales: Tensor | None = None, group_index: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    assert input.dtype in TYPES and input.dim() > 1
    scale = input.float().abs().amax(-1) / 127
    return _int8((input.float() / scale.unsqueeze(-1)).nan_to_num(0.0)), scale


def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    assert x1.dtype == x2.dtype == torch.int8 and x1.dim() == 2 and output_dtype in TYPES
    assert scale.shape in ((1,), (x2.shape[1],)) and scale.dtype == torch.float32
    y = (x1.long() @ x2.long()).int()
    if bias is not None:
        assert bias.dtype == torch.int32
        y = y + bias
    y = y.float() * scale
    if pertoken_scale is not None:
        assert pertoken_scale.shape == (x1.shape[0],)
        y = y * pertoken_scale.unsqueeze(-1)
    return y.to(output_dtype)


def npu_weight_quant_batchmatmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    bias: Tensor | None = None,
    antiquant_group_size: int = 0,
    inner_precise: int = 0,
) -> Tensor:
    assert weight.dtype == torch.int8 and antiquant_scale.dtype == x.dtype
    return (x.float() @ (weight.float() * antiquant_scale.float())).to(x.dtype)


def npu_grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
) -> list[Tensor]:
    assert (split_item, group_type, group_list_type) == (3, 0, 0) and len(x) == len(weight) == 1
    assert group_list is not None and group_list.dtype == torch.int64
    (rows,), (matrices,) = x, weight
    assert rows.dim() == 2 and matrices.shape[:2] == (group_list.shape[0], rows.shape[1])
    position = torch.arange(rows.shape[0], device=rows.device).unsqueeze(1)
    group = (position >= group_list).sum(1)
    y = rows.new_full((rows.shape[0], matrices.shape[2]), math.nan)  # rows of no group stay as they are
    for e in range(matrices.shape[0]):
        y = torch.where((group == e).unsqueeze(1), (rows.float() @ matrices[e].float()).to(rows.dtype), y)
    return [y]


def npu_swiglu(self: Tensor, dim: int = -1) -> Tensor:
    gate, up = self.chunk(2, dim)
    return torch.nn.functional.silu(gate) * up


def npu_rotary_mul(self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    assert self.dim() == r1.dim() == r2.dim() == 4 and r1.dtype == r2.dtype == self.dtype
    assert r1.shape == (1, self.shape[1], 1, self.shape[3])  # input BSND: 1S1D
    if rotary_mode == "half":
        first, second = self.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    else:
        assert rotary_mode == "interleave"
        turned = torch.stack((-self[..., 1::2], self[..., ::2]), -1).flatten(-2)
    return (r1.float() * self.float() + r2.float() * turned.float()).to(self.dtype)


def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    softmax_lse_flag: bool = False,
) -> tuple[Tensor, Tensor]:
    assert input_layout == "BNSD" and block_table is not None and block_table.dtype == torch.int32
    assert (
        query.is_contiguous() and key.is_contiguous() and key.shape[1:3] == (num_key_value_heads, block_size)
    )
    assert block_size % 128 == 0 and query.shape[1] == num_heads
    batch, _, count, _ = query.shape
    assert len(actual_seq_lengths_kv) == batch
    if sparse_mode == 3:  # causal, the last query sees all keys
        assert atten_mask is not None and atten_mask.shape == (2048, 2048) and bool(atten_mask[0, 1])
    else:
        assert sparse_mode == 0 and atten_mask is None and count == 1
    out = torch.zeros_like(query)
    for b, length in enumerate(actual_seq_lengths_kv):
        if length == 0:
            out[b] = math.nan  # nobody says what it is
            continue
        pages = block_table[b, : -(-length // block_size)].long()
        k, v = (c[pages].transpose(0, 1).flatten(1, 2)[:, :length].float() for c in (key, value))
        group = num_heads // num_key_value_heads
        scores = query[b].float() @ k.repeat_interleave(group, 0).transpose(1, 2) * scale
        hidden = torch.ones(count, length, dtype=torch.bool).triu(length - count + 1)
        scores = scores.masked_fill(hidden, -math.inf)
        out[b] = (scores.softmax(-1) @ v.repeat_interleave(group, 0)).to(query.dtype)
    return out, query.new_zeros(1)


def _int8(x: Tensor) -> Tensor:
    return x.round().clamp(-128, 127).to(torch.int8)
