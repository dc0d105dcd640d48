"""Torch's tensors as OpenVINO's, over the same memory."""

from __future__ import annotations

from typing import Any

import openvino as ov
import torch
from torch import Tensor

TYPES: dict[torch.dtype, Any] = {
    torch.float32: ov.Type.f32,
    torch.bfloat16: ov.Type.bf16,
    torch.float16: ov.Type.f16,
    torch.int8: ov.Type.i8,
    torch.uint8: ov.Type.u8,
    torch.int32: ov.Type.i32,
    torch.int64: ov.Type.i64,
    torch.bool: ov.Type.boolean,
}
"""OpenVINO's types of torch's."""


def shared(x: Tensor) -> Any:
    """Return an `ov.Tensor` over the memory of x, which is contiguous and must stay alive."""
    x = x.detach()
    if x.dtype is torch.bfloat16:  # numpy doesn't know it
        return ov.Tensor(x.view(torch.int16).numpy(), ov.Shape(list(x.shape)), ov.Type.bf16)
    return ov.Tensor(x.numpy(), ov.Shape(list(x.shape)), TYPES[x.dtype])
