"""Keeps Python's garbage collector from looking through torch, which stays for the life of the process."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imports_stay() -> Iterator[None]:
    """Collect nothing while torch is imported in the block, and look at nothing of it ever after.

    It makes a quarter of a million objects, and looking for garbage among them takes an eighth of the
    import's time, and some later. It is for processes that are ours, the commands: where torch is there
    already the block runs as it is, since objects of other people would be kept from collection. The
    collector is not switched on for those who switched it off.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if "torch" in sys.modules:
            gc.freeze()
        gc.enable()
