"""The C library's allocator, which keeps memory that nobody uses."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any


def give_back_freed() -> None:
    """Return to the kernel what was freed but lies between blocks in use; glibc's allocator keeps that.

    Large blocks that come and go between small ones that stay find no room where the last one was, so
    that each takes new memory: gigabytes, for megabytes in use. Nothing happens with other C libraries.
    """
    if (trim := _malloc_trim()) is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
