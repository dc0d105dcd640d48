"""What a compiler for pieces is, and what it makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, fx

from piecework.devices.base import Device
from piecework.errors import PieceworkError
from piecework.graph.binding import MAX_TOKENS
from piecework.graph.counters import Counters


class CompileError(PieceworkError):
    """A compiler that failed on a piece; `compiler` and `reason` say which and why."""

    def __init__(self, compiler: str, reason: str) -> None:
        self.compiler = compiler
        self.reason = reason
        super().__init__(f"the compiler {compiler} failed: {reason}")


class NotForCompilerError(CompileError):
    """A piece that is none for this compiler, today as at any other start."""

    def __init__(self, compiler: str, reason: str) -> None:
        super().__init__(compiler, reason)
        self.args = (f"not a piece for the compiler {compiler}: {reason}",)


class CompiledPiece(Protocol):
    """A piece that runs: tensors in, tensors out, weights among the inputs.

    Attributes:
        opaque: it runs code that no record of torch operations can see.
        compiler: who made it. source: what it runs, as text, where there is some.
    """

    opaque: bool

    @property
    def compiler(self) -> str: ...

    @property
    def source(self) -> str: ...

    def __call__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None) -> Sequence[Tensor]:
        """Run, and return the results; with `outputs` they are written into those, which are returned."""


@dataclass
class CompileContext:
    """What a compiler is told beside the piece.

    Attributes:
        key: the piece's structural key. index: its place among the `count` distinct pieces.
        cache_dir: where compiled pieces are kept; None keeps none.
        cached: set by a compiler that found the piece there.
        calls: for each call of the piece its inputs that are weights, None for all others.
        automatic: the compiler is the device's choice; whoever asked for none gets the next for a piece
            that isn't for this one, in strict mode too.
        tokens: the one size that the piece will have; None is every size.
    """

    device: Device
    key: str = ""
    index: int = 0
    count: int = 1
    cache_dir: Path | None = None
    strict: bool = False
    max_tokens: int = MAX_TOKENS
    counters: Counters = field(default_factory=Counters)
    cached: bool = False
    automatic: bool = False
    tokens: int | None = None
    calls: Sequence[Sequence[Tensor | None]] = ()


class Compiler(Protocol):
    """Makes a piece out of its graph. `parallel`: several threads may compile at once.

    Raises CompileError from `compile` when it can't.
    """

    name: str
    parallel: bool

    def compile(self, piece: fx.GraphModule, context: CompileContext) -> CompiledPiece:
        """Compile `piece`, whose placeholders and nodes carry shapes in `meta["val"]`, for all sizes."""


def write_results(results: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Copy results into the tensors that a caller wants them in."""
    for result, output in zip(results, outputs, strict=True):
        output.copy_(result)
    return outputs


class FunctionPiece:
    """A piece made of one function on flat tensors."""

    __slots__ = ("compiler", "function", "opaque", "source")

    def __init__(
        self, function: Callable[..., Sequence[Tensor]], compiler: str, source: str = "", opaque: bool = True
    ) -> None:
        self.function = function
        self.compiler = compiler
        self.source = source
        self.opaque = opaque

    def __call__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None) -> Sequence[Tensor]:
        """Run; see CompiledPiece."""
        results = self.function(*inputs)
        return results if outputs is None else write_results(results, outputs)


def first_line(error: BaseException) -> str:
    """Return an error as one line: its kind and what it says first."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


def token_input(piece: fx.GraphModule) -> tuple[int, int] | None:
    """Return the position of the input whose dimension tells the number of tokens, and that dimension."""
    for position, node in enumerate(piece.graph.find_nodes(op="placeholder")):
        for dim, size in enumerate(node.meta["val"].shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                return position, dim
    return None
