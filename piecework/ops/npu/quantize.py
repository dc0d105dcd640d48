"""`quantize` and `dynamic_quantize` on NPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from piecework.ops import quantize as ops
from piecework.ops.npu.vendor import available, call

HALVES = (torch.float16, torch.bfloat16)


def _supports_quantize(x: Tensor, scale: Tensor, reciprocal: Tensor, offset: Tensor | None = None) -> bool:
    return available() and x.dtype in (*HALVES, torch.float32)


@ops.quantize.implement("npu", supports=_supports_quantize)
def quantize(x: Tensor, scale: Tensor, reciprocal: Tensor, offset: Tensor | None = None) -> Tensor:
    """Quantise with a product: the last bit of a value next to a half may be the other one."""
    (y,) = call(
        "npu_quantize",
        self=x,
        scales=reciprocal,
        zero_points=offset,
        dtype=torch.qint8,
        axis=-1,
        div_mode=False,
    )
    return y


def _supports_dynamic(x: Tensor) -> bool:
    return available() and x.dtype in HALVES and x.dim() > 1


@ops.dynamic_quantize.implement("npu", supports=_supports_dynamic)
def dynamic_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each row; see the reference."""
    y, scale = call("npu_dynamic_quant", input=x)
    return y, scale.unsqueeze(-1)
