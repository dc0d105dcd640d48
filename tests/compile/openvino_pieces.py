"""Every named op that OpenVINO converts, in two functions of tokens, and pieces of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from piecework.compile.base import CompileContext
from piecework.devices import make_device
from piecework.graph.trace import trace

OPS = torch.ops.piecework
HIDDEN, HEADS, KV_HEADS, DIM, EXPERTS, INNER = 32, 2, 1, 8, 4, 12
WIDTH = (HEADS + 2 * KV_HEADS) * DIM


def floats(dtype: torch.dtype) -> tuple[Callable[..., Any], list[Tensor]]:
    """All ops on floats, and their weights."""
    made = torch.Generator().manual_seed(1)

    def weight(*shape: int, around: float = 0.0) -> Tensor:
        x = torch.randn(shape, generator=made) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.3)
        return (x + around).to(dtype)

    angles = torch.rand(64, 3, generator=made) * 6
    weights = [
        weight(40, HIDDEN),
        weight(HIDDEN, around=1),
        weight(WIDTH, HIDDEN),
        weight(WIDTH),
        torch.cat((angles.cos(), angles.sin()), -1),
        weight(DIM, around=1),
        weight(DIM),
        weight(EXPERTS, HIDDEN),
        weight(EXPERTS, 2 * INNER, HIDDEN),
        weight(EXPERTS, HIDDEN, INNER),
    ]

    def fn(
        ids: Tensor,
        positions: Tensor,
        valid: Tensor,
        x: Tensor,
        table: Tensor,
        norm: Tensor,
        packed: Tensor,
        bias: Tensor,
        cos_sin: Tensor,
        head_norm: Tensor,
        head_bias: Tensor,
        router: Tensor,
        w13: Tensor,
        w2: Tensor,
    ) -> Any:
        rows = OPS.embedding(ids, table)
        y, total = OPS.add_rms_norm(x, rows, norm, 1e-5)
        qkv = OPS.linear(OPS.rms_norm(y, norm, 1e-6), packed, bias)
        plain = OPS.split_qkv_rope(qkv, positions, cos_sin, HEADS, KV_HEADS)
        normed = OPS.split_qkv_rmsnorm_rope(
            qkv, positions, cos_sin, head_norm, head_norm, 1e-6, HEADS, KV_HEADS, head_bias, None, True
        )
        q, k, _ = torch.split_with_sizes(qkv, [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], -1)
        turned = OPS.rotary(positions, q.view(-1, HEADS, DIM), k.view(-1, KV_HEADS, DIM), cos_sin, True)
        experts = OPS.moe(x, OPS.linear(x, router), w13, w2, 2, True, valid)
        return total, *plain, *normed, *turned, experts, OPS.silu_and_mul(qkv), torch.empty_like(x), x

    return fn, weights


def integers() -> tuple[Callable[..., Any], list[Tensor]]:
    """All ops that quantise or have int8 weights, and their weights, some token ids at the end."""
    made = torch.Generator().manual_seed(2)
    scale = torch.tensor([0.02])
    weights = [
        torch.rand(HIDDEN, generator=made) + 0.5,
        scale,
        1 / scale,
        torch.tensor([3.0]),
        torch.randint(-127, 128, (24, HIDDEN), generator=made).to(torch.int8),
        torch.rand(24, generator=made) / 127,
        torch.randint(-999, 999, (24,), generator=made).to(torch.int32),
        torch.randn(24, generator=made),
        torch.tensor([3, 0, 23]),
    ]

    def fn(
        x: Tensor,
        norm: Tensor,
        s: Tensor,
        r: Tensor,
        offset: Tensor,
        weight: Tensor,
        w_scale: Tensor,
        quant_bias: Tensor,
        bias: Tensor,
        ids: Tensor,
    ) -> Any:
        xq, x_scale = OPS.dynamic_quantize(x)
        double = torch.cat((x, x + 0.5), -1)
        static = OPS.quantize(x, s, r, offset)
        return (
            xq,
            x_scale,
            static,
            OPS.linear_w8a8(static, weight, w_scale, None, quant_bias, bias, torch.float32),
            OPS.linear_w8a8(xq, weight, w_scale, x_scale, None, None, torch.bfloat16),
            OPS.linear_w8(x, weight, w_scale, bias),
            OPS.embedding_int8(ids, weight, w_scale, torch.float32),
            OPS.rms_norm_quant(x, norm, 1e-5, s, r),
            *OPS.rms_norm_dynamic_quant(x, norm, 1e-5),
            *OPS.add_rms_norm_quant(x, x * 2, norm, 1e-5, s, r, offset),
            *OPS.add_rms_norm_dynamic_quant(x, x - 1, norm, 1e-5),
            OPS.silu_mul_quant(double, s, r),
            *OPS.silu_mul_dynamic_quant(double),
        )

    return fn, weights


def inputs(tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Ids, positions, valid rows and activations of `floats`; the last one is that of `integers`."""
    made = torch.Generator().manual_seed(tokens)
    return [
        torch.randint(0, 40, (tokens,), generator=made),
        torch.randint(0, 64, (tokens,), generator=made),
        torch.tensor([max(1, tokens - 2)]),
        torch.randn(tokens, HIDDEN, generator=made).to(dtype),
    ]


def piece_of(fn: Callable[..., Any], examples: Sequence[Tensor]) -> fx.GraphModule:
    """A function as a piece."""
    return trace(fn, examples).graph_module


def context(weights: Sequence[Tensor] = (), before: int = 0, **settings: Any) -> CompileContext:
    """What a compiler is told of a piece that is called once, with `before` inputs before its weights."""
    calls = [(*[None] * before, *weights)] if weights else ()
    device = settings.pop("device", None) or make_device("openvino:CPU")
    return CompileContext(device, key="0" * 64, calls=calls, **settings)
