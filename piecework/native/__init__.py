"""Kernels for the CPU in C++, built with the system's compiler at first use, called through ctypes."""

from piecework.native.library import library, reads_panels
from piecework.native.toolchain import ISAS, isa

__all__ = ["ISAS", "isa", "library", "reads_panels"]
