"""Hands a list of kernel calls to the CPU's library, which makes them in one go."""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Callable, Sequence

from piecework.compile.plan import Call, Size
from piecework.native import library
from piecework.ops.cpu.kernels import KERNELS

_FIELD = 3 * 8
"""Bytes of `Field` of native/src/run.h: buffer, per_token, constant; `Step`: kernel, fields, count."""


class NativeCalls:
    """Calls in order, with memory between them. The library must be there.

    Threads may run them at once: each has memory of its own.
    """

    def __init__(self, calls: Sequence[Call], arena: Size) -> None:
        self.arena = arena
        self._count = len(calls)
        numbers = itertools.chain.from_iterable
        self._fields = array("q", numbers((f.buffer, *f.offset) for call in calls for f in call.fields))
        place = self._fields.buffer_info()[0]
        steps: list[int] = []
        for call in calls:
            kernel = ctypes.cast(KERNELS[call.kernel].function, ctypes.c_void_p)  # type: ignore[arg-type]
            steps += (kernel.value or 0, place, len(call.fields))
            place += len(call.fields) * _FIELD
        self._steps = array("q", steps)
        self._start = self._steps.buffer_info()[0]
        self._run = _run()

    def run(self, buffers: bytes, tokens: int) -> None:
        """Run with these addresses of the buffers, 8 bytes each."""
        arena = self.arena.at(tokens)
        if self._run(self._start, self._count, buffers, tokens, arena):
            raise MemoryError(f"no memory for {arena} bytes between kernels")


def _run() -> Callable[[int, int, bytes, int, int], int]:
    found = library()
    assert found is not None
    run = found["piecework_run"]
    run.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64]
    run.restype = ctypes.c_int64
    return run
