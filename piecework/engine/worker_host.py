"""The host of the engine's worker processes: it shows what `PIECEWORK_DEBUG` asks for, as the engine does."""

from __future__ import annotations

from piecework import debug
from piecework.workers.process.host import Context
from piecework.workers.serving.host import ServingHost


class EngineHost(ServingHost):
    """A ServingHost whose programs are shown before the first step."""

    def __init__(self, context: Context) -> None:
        depth = debug.level()
        super().__init__(context)
        if depth:
            from piecework.explain.layers import show_layers

            show_layers(self.programs, depth)
