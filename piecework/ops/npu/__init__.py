"""Implementations for Ascend NPUs through torch_npu, which the first call imports.

`vendor.py` lists the functions and arguments that are used; a test compares it with released wheels.
"""

from piecework.ops.npu import attention as attention
from piecework.ops.npu import gate as gate
from piecework.ops.npu import heads as heads
from piecework.ops.npu import linear as linear
from piecework.ops.npu import moe as moe
from piecework.ops.npu import norm as norm
from piecework.ops.npu import quantize as quantize
