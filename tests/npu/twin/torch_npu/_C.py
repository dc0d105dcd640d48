"""What of torch_npu's own module is used."""

from __future__ import annotations

from torch import Tensor

from torch_npu._machine import machine


def _weak_ref_tensor(tensor: Tensor) -> Tensor:
    return machine().memory.alias(tensor)
