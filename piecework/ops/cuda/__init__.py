"""Implementations for CUDA, in torch."""

from piecework.ops.cuda import attention as attention
