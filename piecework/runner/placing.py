"""Pieces that a user puts on other devices by hand: the setting `place`.

    0:cpu,last:openvino:NPU,head:cpu

Each part names a distinct piece of the model's body, by number from 0 (explain's A is 0) or `last`, or the
`head`; then, behind the first colon, a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx

from piecework.compile.base import CompileContext, CompiledPiece, Compiler
from piecework.devices import Device, make_device
from piecework.errors import ConfigError
from piecework.runner.spare import compile_on, run_on

FIELD = "place"
HEAD = "head"
_LAST = "last"


def read_places(text: str | None, dtype: torch.dtype) -> dict[str, Device]:
    """Read the setting; returns devices by piece, made for weights in `dtype`.

    Raises ConfigError, which names the piece, for what is no piece, a piece that is there twice, and a device
    that is not there or doesn't run in `dtype`.
    """
    found: dict[str, Device] = {}
    for part in () if text is None else text.split(","):
        piece, colon, name = (word.strip() for word in part.partition(":"))
        if not colon or not (piece.isdecimal() or piece in (_LAST, HEAD)):
            raise ConfigError(
                FIELD, text, f"a number, {_LAST} or {HEAD}, then a colon and a device; not {part!r}"
            )
        piece = str(int(piece)) if piece.isdecimal() else piece
        if piece in found:
            raise ConfigError(FIELD, text, f"each piece once; {piece} is there twice")
        try:
            device = make_device(name)
        except ConfigError as error:
            raise ConfigError(FIELD, text, f"for piece {piece} {error.allowed}; not {name!r}") from error
        if not device.supports_dtype(dtype):
            allowed = f"for piece {piece} a device that runs in {dtype}; {name} doesn't"
            raise ConfigError(FIELD, text, allowed)
        found[piece] = device
    return found


class PlacingCompiler:
    """A compiler with others beside it for the pieces that were placed, each its device's default one."""

    announces = True

    def __init__(self, first: Compiler, places: Mapping[str, Device]) -> None:
        self.name = first.name
        self.parallel = first.parallel
        self._first = first
        self._places = places

    def compile(self, piece: fx.GraphModule, context: CompileContext) -> CompiledPiece:
        """Compile `piece` where it was put, or as the first compiler does.

        Raises what that raises, and ConfigError where a piece was placed that the model doesn't have.
        """
        device = self._device_of(context)
        if device is not None:
            return PlacedPiece(compile_on(device, piece, context), device, context.device)
        if not getattr(self._first, "announces", False):
            context.device.notify("compile", context.index)
        return self._first.compile(piece, context)

    def _device_of(self, context: CompileContext) -> Device | None:
        count, places = context.count, self._places
        if HEAD in places:
            return places[HEAD]
        for piece in places:
            if piece != _LAST and int(piece) >= count:
                allowed = f"a piece below {count}, or {_LAST}, since the model has {count} distinct pieces"
                raise ConfigError(FIELD, f"{piece}:{places[piece].name}", allowed)
        if _LAST in places and str(count - 1) in places:
            raise ConfigError(FIELD, f"{count - 1} and {_LAST}", "each piece once; these two are the same")
        if context.index == count - 1 and _LAST in places:
            return places[_LAST]
        return places.get(str(context.index))


class PlacedPiece:
    """A piece on a device of its own. Where it fails, that is a failure of the whole step."""

    opaque = True
    announces = True
    moved = True
    failure = None

    def __init__(self, compiled: CompiledPiece, device: Device, home: Device) -> None:
        self._compiled = compiled
        self._device = device
        self._home = home

    @property
    def compiler(self) -> str:
        """Who made what runs, and where."""
        return f"{self._compiled.compiler} on {self._device.name} (placed)"

    @property
    def source(self) -> str:
        """What runs, as text."""
        return self._compiled.source

    def __call__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None) -> Sequence[Tensor]:
        """Run; see CompiledPiece."""
        return run_on(self._compiled, self._device, self._home, inputs, outputs)


def check_placed(places: Mapping[str, Device], reasons: Mapping[str, str | None]) -> None:
    """Refuse pieces of a program, `body` or `head`, that has none for the reason given."""
    for piece, device in places.items():
        reason = reasons[HEAD if piece == HEAD else "body"]
        if reason is not None:
            raise ConfigError(
                FIELD, f"{piece}:{device.name}", f"nothing, since there are no pieces: {reason}"
            )
