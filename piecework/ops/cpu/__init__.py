"""Implementations for the CPU: the library's kernels, and torch."""

from piecework.ops.cpu import attention as attention
from piecework.ops.cpu import block_linear as block_linear
from piecework.ops.cpu import coded_linear as coded_linear
from piecework.ops.cpu import gate as gate
from piecework.ops.cpu import int8_linear as int8_linear
from piecework.ops.cpu import linear as linear
from piecework.ops.cpu import moe as moe
from piecework.ops.cpu import norm as norm
from piecework.ops.cpu import rotary as rotary
