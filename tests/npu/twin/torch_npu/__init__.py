"""A stand-in for torch_npu on the machinery of the device `sim`, for tests alone.

It has the parts that are used, under the names and with the signatures of the real package, which a test
compares with released wheels. Tensors are CPU tensors in the simulated memory. What torch_npu computes is
registered with torch as the operations `npu::...`, as in the real package.
"""

from __future__ import annotations

import torch

from torch_npu import _C as _C
from torch_npu import _ops as _ops
from torch_npu import npu as npu
from torch_npu._ops import empty_with_format as empty_with_format

# The real package has the number of the torch that it was built for.
__version__ = ".".join([*torch.__version__.split(".")[:2], "twin"])

for _name in _ops.REGISTERED:
    globals()[_name] = getattr(torch.ops.npu, _name)
