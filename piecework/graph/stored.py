"""Programs on disk: a start that finds its program there neither traces, nor runs passes, nor imports them.

What is kept is the linked program: steps, and the text or the plan of its distinct pieces. Weights are in it
by name only, with their shapes. A program is stored when it says everything about itself: all pieces are
text or plans, all its tensors are the model's, and nothing was left out with a warning, but for pieces
that another compiler took, which each start says again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from piecework.cache import try_read_json, try_write
from piecework.compile.base import NotForCompilerError
from piecework.compile.cache import content_key
from piecework.compile.native_piece import NAME, NativePiece
from piecework.compile.pieces import PieceRecord, tell
from piecework.compile.plan import read_plan, spell_plan
from piecework.compile.source import SourcePiece, overload, read, spell
from piecework.devices.base import Device
from piecework.devices.injected import FaultyDevice
from piecework.graph.binding import Binding
from piecework.graph.counters import Counters
from piecework.graph.program import HoleCall, PieceCall, Program, Slot

if TYPE_CHECKING:
    from torch import nn

    from piecework.compile.base import CompiledPiece

log = logging.getLogger("piecework.graph")

FORMAT = 3
_PACKAGE = Path(__file__).parents[1]


class ProgramStore:
    """Programs in a folder, by everything that they are made from.

    `parts` are the settings, the model's configuration and the like, as plain values; versions, the
    package's own sources and the device's state are added.
    """

    def __init__(self, folder: Path, device: Device, parts: Mapping[str, Any]) -> None:
        self._device = device
        self._folder = folder / "programs"
        self._parts = {
            **parts,
            "format": FORMAT,
            "torch": torch.__version__,
            "package": sources_digest(),
            "device": [device.name, device.op_order, device.fingerprint()],
        }

    def path(self, name: str) -> Path:
        """Return where the program `name` of this model is, or would be."""
        return self._folder / f"{content_key({**self._parts, 'program': name})}.json"

    def load(self, name: str, module: nn.Module, counters: Counters) -> Program | None:
        """Return the program `name` over the weights of `module`, or None where it isn't there.

        The counts of its making are added to `counters`. An entry that doesn't fit is told in the log.
        """
        path = self.path(name)
        stored = try_read_json(path)
        if stored is None:
            return None
        try:
            content = stored["content"]
            if stored["sha256"] != _digest(content):
                raise ValueError("its content was changed")  # it may look whole, and compute something else
            program = _read_program(content, tensors_of(module), self._device)
            counts = dict(content["counters"])
        except (LookupError, ValueError, TypeError, AttributeError, SyntaxError) as error:
            reason = f"{type(error).__name__}: {error}"
            log.warning("the stored program %s is refused and made again: %s", path, reason)
            return None
        for key, value in counts.items():
            if key.startswith("pass_matches."):
                counters.add_matches(key.partition(".")[2], value)
            else:
                counters.add(key, value)
        counters.add("stored_programs")
        return program

    def save(self, name: str, program: Program, module: nn.Module, counters: Counters) -> bool:
        """Store the program `name`, with the counts of its making; False if it is none that can be stored."""
        reason = _unstorable(program)
        written = None if reason else _write_program(program, tensors_of(module))
        if written is None:
            log.debug("the program %s is not stored: %s", name, reason or "it has constants of its own")
            return False
        counts = {k: v for k, v in counters.snapshot().items() if v}
        content = {**written, "counters": counts}
        try_write(self.path(name), json.dumps({"sha256": _digest(content), "content": content}))
        return True


def storable(device: Device) -> bool:
    """Whether programs may be kept: what other packages bring may change without a trace here."""
    own = type(device).__module__.startswith("piecework.")
    own = own and not (isinstance(device, FaultyDevice) and device.fails_to_compile)
    return own and not any(entry_points(group="piecework.passes"))


@cache
def sources_digest() -> str:
    """Hash the sources of this package: whoever changes them gets new programs."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(_PACKAGE)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _unstorable(program: Program) -> str | None:
    if program.opaque_reason is not None:
        return "the model can't be traced"
    if not all(isinstance(piece, SourcePiece | NativePiece) for piece in program.pieces):
        return "its compiler has a cache of its own"
    if any(record.failure and not record.lasting for record in program.records):
        return "a piece failed to compile"
    report = program.pass_report
    if report is not None and any(p.status in ("refused", "failed") or p.missed for p in report.passes):
        return "a pass did not do what it should"
    return None


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, a shared one once."""
    return dict([*module.named_parameters(), *module.named_buffers()])


def signature(tensor: Tensor) -> list[Any]:
    """Return what a trace sees of a weight: shape, strides and dtype."""
    return [list(tensor.shape), list(tensor.stride()), str(tensor.dtype)]


def _write_program(program: Program, tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
    pieces = [_write_piece(piece) for piece in program.pieces]
    if None in pieces:
        return None
    bindings: list[list[Any]] = []
    for binding in program.bindings:
        if binding.tensor is None:
            bindings.append([binding.kind, binding.name, None])
        elif tensors.get(binding.name) is binding.tensor:
            bindings.append([binding.kind, binding.name, signature(binding.tensor)])
        else:
            return None
    steps = [_write_step(step) for step in program.steps]
    if None in steps:
        return None
    return {
        "pieces": pieces,
        "bindings": bindings,
        "steps": steps,
        "slots": program.num_slots,
        "outputs": program.output_slots,
        "single": program.single,
        "max_tokens": program.max_tokens,
        "token_input": program.token_input,
        "records": [[r.key, r.failure, r.automatic] for r in program.records],
    }


def _write_piece(piece: CompiledPiece) -> dict[str, Any] | None:
    if isinstance(piece, NativePiece):
        return {"plan": spell_plan(piece.plan)}
    assert isinstance(piece, SourcePiece)
    constants = {name: spell(value) for name, value in piece.constants.items()}
    if None in constants.values():
        return None
    return {"source": piece.source, "constants": constants, "compiler": piece.compiler}


def _read_piece(stored: Mapping[str, Any]) -> CompiledPiece:
    if "plan" in stored:
        return NativePiece(read_plan(stored["plan"]))
    constants = {name: read(spelled) for name, spelled in stored["constants"].items()}
    return SourcePiece(stored["source"], constants, stored["compiler"])


def _write_step(step: PieceCall | HoleCall) -> list[Any] | None:
    if isinstance(step, PieceCall):
        return ["piece", step.distinct, step.inputs, step.outputs, step.frees]
    values = [*step.args, *step.kwargs.values()]
    if not all(value is None or isinstance(value, Slot | int | float | str) for value in values):
        return None
    args = [_write_value(a) for a in step.args]
    kwargs = {name: _write_value(a) for name, a in step.kwargs.items()}
    return ["hole", step.op, str(step.function), args, kwargs, step.result, step.frees]


def _write_value(value: Any) -> Any:
    return {"slot": value.index} if isinstance(value, Slot) else value


def _read_value(value: Any) -> Any:
    return Slot(value["slot"]) if isinstance(value, dict) else value


def _read_program(stored: Mapping[str, Any], tensors: Mapping[str, Tensor], device: Device) -> Program:
    bindings = []
    for kind, name, seen in stored["bindings"]:
        if seen is not None and (name not in tensors or signature(tensors[name]) != seen):
            raise ValueError(f"the model has no tensor {name} of shape, strides and dtype {seen}")
        bindings.append(Binding(kind, name, tensors[name] if seen is not None else None))
    pieces = [_read_piece(piece) for piece in stored["pieces"]]
    program = Program(
        [_read_step(step) for step in stored["steps"]],
        pieces,
        bindings,
        stored["slots"],
        stored["outputs"],
        device,
        single=stored["single"],
        max_tokens=stored["max_tokens"],
        token_input=stored["token_input"],
    )
    records = []
    for (key, failure, automatic), piece in zip(stored["records"], pieces, strict=True):
        lasting = failure is not None
        if lasting:
            tell(str(NotForCompilerError(NAME, failure)), key, automatic)
        records.append(PieceRecord(key, piece.compiler, 0.0, True, failure, lasting, automatic))
    program.records = tuple(records)
    return program


def _read_step(step: list[Any]) -> PieceCall | HoleCall:
    kind, *rest = step
    if kind == "piece":
        distinct, inputs, outputs, frees = rest
        return PieceCall(distinct, tuple(inputs), tuple(outputs), tuple(frees))
    op, function, args, kwargs, result, frees = rest
    return HoleCall(
        op,
        overload(function),
        tuple(_read_value(a) for a in args),
        {name: _read_value(a) for name, a in kwargs.items()},
        result,
        tuple(frees),
    )
