"""A child dies when its parent dies: the kernel is asked to end it, and a pipe tells it too."""

from __future__ import annotations

import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_EXIT_CODE = 1


def die_with_parent(pipe: int, parent: int) -> None:
    """Arrange for the end of this process, whatever it does then.

    `pipe` is the reading end of a pipe of which only the parent has the other one; `parent` is its pid. The
    kernel looks at the thread that started this process: it has to live as long as the process does.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was asked
        os._exit(_EXIT_CODE)
    threading.Thread(target=_watch, args=(pipe,), name="piecework-death-pipe", daemon=True).start()


def _watch(pipe: int) -> None:
    os.read(pipe, 1)  # nobody writes: it returns when the last writer is gone
    os._exit(_EXIT_CODE)
