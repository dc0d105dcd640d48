"""Pieces that move alone: one that its device can't compile, or can't run, goes to the next device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, fx

from piecework.compile.base import CompileContext, CompiledPiece, CompileError, Compiler, write_results
from piecework.compile.registry import make_compiler
from piecework.devices import Device
from piecework.failsafe.events import Stage
from piecework.failsafe.failover import Active, Failover
from piecework.failsafe.policy import Policy


@dataclass(frozen=True)
class PiecePolicy(Policy):
    """A Policy by which a piece stays that is none for its compiler: it runs uncompiled where it is."""

    def moves(self, error: BaseException, stage: Stage) -> bool:
        """Say whether `error` at `stage` is for the next device."""
        return not isinstance(error, CompileError) and super().moves(error, stage)


class FailsafeCompiler:
    """A compiler with the compilers of other devices behind it, each the other device's default one.

    A piece that compiles at once is what its compiler made, with nothing around it, unless `at_run`: then
    it can still move when it runs, which it must not do inside a graph or a chain of pieces.
    """

    announces = True

    def __init__(self, first: Compiler, spares: Sequence[Device], policy: Policy, at_run: bool) -> None:
        self.name = first.name
        self.parallel = first.parallel
        self._first = first
        self._spares = {device.name: device for device in spares}
        self._policy = PiecePolicy(policy.failover)
        self._at_run = at_run

    def compile(self, piece: fx.GraphModule, context: CompileContext) -> CompiledPiece:
        """Compile `piece` on the first device that can.

        Raises CompileError as the first compiler does, and ExhaustedError where all devices failed.
        """
        home = context.device
        devices = {home.name: home, **self._spares}

        def factory(name: str) -> CompiledPiece:
            device = devices[name]
            device.notify("compile", context.index)
            if device is home:
                return self._first.compile(piece, context)
            compiler = make_compiler(device.default_compiler())
            try:
                return compiler.compile(piece, replace(context, device=device))
            except CompileError:
                return make_compiler("eager").compile(piece, replace(context, device=device))

        what = f"piece {context.index} (key {context.key[:12]})"
        failover = Failover(list(devices), factory, self._policy, what=what)
        if failover.active.index == 0 and not self._at_run:
            return failover.active.model
        return FailsafePiece(failover, devices, context)


class FailsafePiece:
    """A piece that is called again on the next device where it fails: it only reads its inputs.

    It is folded as any other: all calls of it go where it went.
    """

    opaque = True
    announces = True

    def __init__(
        self, failover: Failover[CompiledPiece], devices: Mapping[str, Device], context: CompileContext
    ) -> None:
        self._failover = failover
        self._devices = devices
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

    def _run(
        self, active: Active[CompiledPiece], inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None
    ) -> Sequence[Tensor]:
        home, device = self._context.device, self._devices[active.device]
        device.notify("piece", self._context.index)
        if device is home:
            return active.model(inputs, outputs)
        # Between devices with memory of their own, weights could stay over there once they are copied.
        results = active.model([device.place(tensor) for tensor in inputs])
        if outputs is not None:
            return write_results(results, outputs)
        return [home.place(tensor) for tensor in results]
