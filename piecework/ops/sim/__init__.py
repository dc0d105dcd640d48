"""Kernels of the simulated accelerator.

A capture on `sim` records torch operations. What a real device does in one kernel is here one operation
in the namespace `piecework_sim`, whatever it does inside; like a kernel it reads all that changes from
step to step, lengths too, from its tensor arguments.
"""

from piecework.ops.sim import attention as attention
from piecework.ops.sim import moe as moe
