"""The numbers by which the kernels know element types, as in src/types.h."""

from __future__ import annotations

import torch

TYPES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
