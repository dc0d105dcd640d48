"""Pieces that move alone: one that its device can't compile, or can't run, goes to the next device."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, fx

from piecework.compile.base import CompileContext, CompiledPiece, CompileError, Compiler, write_results
from piecework.compile.registry import make_compiler
from piecework.devices import Device, make_device
from piecework.failsafe.errors import loses_memory
from piecework.failsafe.events import Stage
from piecework.failsafe.failover import Active, Failover
from piecework.failsafe.policy import Policy

log = logging.getLogger("piecework.failsafe")


@dataclass(frozen=True)
class Spares:
    """Devices for pieces that fail, by name; each is made when the first piece needs it."""

    names: tuple[str, ...] = ()
    make: Callable[[str], Device] = make_device


@dataclass(frozen=True)
class PiecePolicy(Policy):
    """A Policy by which a piece stays that is none for its compiler: it runs uncompiled where it is.

    One whose inputs are lost with its device can't be called again elsewhere: the whole model has to move.
    """

    def moves(self, error: BaseException, stage: Stage) -> bool:
        """Say whether `error` at `stage` is for the next device."""
        stays = isinstance(error, CompileError) or (stage == "run" and loses_memory(error))
        return not stays and super().moves(error, stage)


class FailsafeCompiler:
    """A compiler with the compilers of other devices behind it, each the other device's default one.

    A piece that compiles at once is what its compiler made, with nothing around it, unless `at_run`: then
    it can still move when it runs, which it must not do inside a graph or a chain of pieces.
    """

    announces = True

    def __init__(self, first: Compiler, spares: Spares, policy: Policy, at_run: bool) -> None:
        self.name = first.name
        self.parallel = first.parallel
        self._first = first
        self._spares = spares
        self._made: dict[str, Device] = {}
        self._lock = threading.Lock()
        self._policy = PiecePolicy(policy.failover)
        self._at_run = at_run

    def compile(self, piece: fx.GraphModule, context: CompileContext) -> CompiledPiece:
        """Compile `piece` on the first device that can.

        Raises CompileError as the first compiler does, and ExhaustedError where all devices failed.
        """
        home = context.device
        asked = itertools.count()

        def factory(name: str) -> CompiledPiece:
            if next(asked) == 0:  # by place: a spare's name may be the home's without its options
                home.notify("compile", context.index)
                return self._first.compile(piece, context)
            return compile_on(self._device(name), piece, context)

        what = f"piece {context.index} (key {context.key[:12]})"
        failover = Failover([home.name, *self._spares.names], factory, self._policy, what=what)
        if failover.active.index == 0 and not self._at_run:
            return failover.active.model
        return FailsafePiece(failover, self._device, context)

    def _device(self, name: str) -> Device:
        with self._lock:
            if name not in self._made:
                self._made[name] = self._spares.make(name)
            return self._made[name]


class FailsafePiece:
    """A piece that is called again on the next device where it fails: it only reads its inputs.

    It is folded as any other: all calls of it go where it went.
    """

    opaque = True
    announces = True

    def __init__(
        self, failover: Failover[CompiledPiece], device: Callable[[str], Device], context: CompileContext
    ) -> None:
        self._failover = failover
        self._device = device
        self._context = context
        if self.moved:
            context.counters.add("moved_pieces")

    @property
    def moved(self) -> bool:
        """Whether it runs on another device than its neighbours."""
        return self._failover.active.index > 0

    @property
    def compiler(self) -> str:
        """Who made what runs, and where."""
        active = self._failover.active
        return active.model.compiler + (f" on {active.device}" if self.moved else "")

    @property
    def source(self) -> str:
        """What runs, as text."""
        return self._failover.active.model.source

    @property
    def failure(self) -> str | None:
        """Why it moved."""
        events = self._failover.events
        return f"{events[0].source} failed at {events[0].stage}: {events[0].reason}" if events else None

    def __call__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None) -> Sequence[Tensor]:
        """Run; see CompiledPiece."""
        while True:
            active = self._failover.active
            try:
                return self._run(active, inputs, outputs)
            except Exception as error:
                if not self._failover.policy.moves(error, "run"):
                    raise
                self._failover.advance(active.generation, "run", error)
                self._context.counters.add("moved_pieces")
                self._context.counters.add("recompiles")

    def _run(
        self, active: Active[CompiledPiece], inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None
    ) -> Sequence[Tensor]:
        home = self._context.device
        if active.index == 0:
            home.notify("piece", self._context.index)
            return active.model(inputs, outputs)
        return run_on(active.model, self._device(active.device), home, inputs, outputs)


def compile_on(device: Device, piece: fx.GraphModule, context: CompileContext) -> CompiledPiece:
    """Compile `piece` as `device` does by default; what its compiler does not take runs uncompiled."""
    device.notify("compile", context.index)
    own = replace(context, device=device)
    try:
        return make_compiler(device.default_compiler()).compile(piece, own)
    except CompileError as error:
        log.info("%s; the piece runs uncompiled on %s (key %s)", error, device.name, context.key[:12])
        return make_compiler("eager").compile(piece, own)


def run_on(
    piece: CompiledPiece,
    device: Device,
    home: Device,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor] | None,
) -> Sequence[Tensor]:
    """Run a piece on `device` between pieces that run on `home`; see CompiledPiece."""
    # Between devices with memory of their own, weights could stay over there once they are copied.
    results = piece([device.place(tensor) for tensor in inputs])
    if outputs is not None:
        return write_results(results, outputs)
    return [home.place(tensor) for tensor in results]
