"""The code that compiled pieces run, as text."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from typing import Any

from piecework.compile.base import CompiledPiece

_MOST_LOOKED_AT = 2000
# What inductor would run to choose between kernels, quoted before the module itself.
_TUNING = re.compile(r'\A\s*r?""".*?"""\n', re.DOTALL)


def source_of(piece: CompiledPiece) -> str:
    """Return what a piece runs: its own text, or that of the kernels that inductor wrote for it.

    Empty for a compiler that leaves no text behind.
    """
    return piece.source or "\n\n".join(dict.fromkeys(_inductor_sources(piece)))


def _inductor_sources(start: Any) -> Iterable[str]:
    """Look for outputs of inductor's, which know their source, in what a callable is made of.

    torch wraps them into functions of its own, otherwise in each release, so no path to them is known.
    """
    waiting: deque[Any] = deque([start])
    seen = {id(start)}
    while waiting and len(seen) < _MOST_LOOKED_AT:
        thing = waiting.popleft()
        source = getattr(thing, "source_code", None)
        if isinstance(source, str) and source:
            yield _TUNING.sub("", source)
            continue
        for part in _parts(thing):
            if id(part) not in seen and (callable(part) or isinstance(part, list | tuple)):
                seen.add(id(part))
                waiting.append(part)


def _parts(thing: Any) -> list[Any]:
    if isinstance(thing, list | tuple):
        return list(thing)
    if isinstance(thing, type):
        return []
    found = [getattr(thing, name, None) for name in getattr(type(thing), "__slots__", ())]
    found += list(getattr(thing, "__dict__", {}).values())
    found += [getattr(thing, "__self__", None)]
    for cell in getattr(thing, "__closure__", None) or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # a cell that nothing was put into
            continue
    return found
