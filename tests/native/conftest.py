"""Kernels run on more than one thread."""

from two_threads import two_threads as two_threads
