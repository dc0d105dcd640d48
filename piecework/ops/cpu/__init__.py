"""Implementations for the CPU, in torch."""

from piecework.ops.cpu import attention as attention
from piecework.ops.cpu import moe as moe
