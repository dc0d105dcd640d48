"""Compiles the distinct pieces of a program, at once where the compiler allows."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from torch import Tensor, fx

from piecework.compile.base import CompileContext, CompiledPiece, CompileError, Compiler, NotForCompilerError
from piecework.profile import now

log = logging.getLogger("piecework.compile")


@dataclass(frozen=True)
class PieceRecord:
    """How one distinct piece was compiled.

    Attributes:
        key: its structural key.
        compiler: who compiled it, in `seconds`; `cached` if that was read from the disk.
        failure: why the compiler that was asked for didn't; None if it did. lasting: it never will.
        automatic: nobody asked for it, the device chose it.
    """

    key: str
    compiler: str
    seconds: float
    cached: bool = False
    failure: str | None = None
    lasting: bool = False
    automatic: bool = False


def compile_pieces(
    pieces: Sequence[fx.GraphModule],
    keys: Sequence[str],
    compiler: Compiler,
    context: CompileContext,
    *,
    calls: Sequence[Sequence[Sequence[Tensor | None]]] | None = None,
    threads: int | None = None,
) -> tuple[list[CompiledPiece], list[PieceRecord]]:
    """Compile pieces, each under its structural key; pieces and their records stand in the same order.

    A piece whose compiler fails runs uncompiled, with a warning that says why; in strict mode the first
    CompileError is raised. A piece that isn't for a compiler which nobody asked for is told as information.
    `calls`: the weights of each piece's calls, see CompileContext. `threads`: how many compile at once; by
    default one per core.
    """
    known = calls or [()] * len(keys)
    contexts = [
        replace(context, key=key, index=index, count=len(keys), calls=of)
        for index, (key, of) in enumerate(zip(keys, known, strict=True))
    ]
    workers = min(threads or os.cpu_count() or 1, len(pieces))
    if not compiler.parallel or workers < 2:
        done = [_compile(piece, c, compiler) for piece, c in zip(pieces, contexts, strict=True)]
    else:
        with ThreadPoolExecutor(workers, thread_name_prefix="piecework-compile") as pool:
            done = list(pool.map(_compile, pieces, contexts, [compiler] * len(pieces)))
    return [piece for piece, _ in done], [record for _, record in done]


def _compile(
    piece: fx.GraphModule, context: CompileContext, compiler: Compiler
) -> tuple[CompiledPiece, PieceRecord]:
    start, failure, lasting = now(), None, False
    if not getattr(compiler, "announces", False):
        context.device.notify("compile", context.index)
    try:
        compiled = compiler.compile(piece, context)
        failure = getattr(compiled, "failure", None)
        context.counters.add("compiles")
    except CompileError as error:
        lasting = isinstance(error, NotForCompilerError)
        expected = lasting and context.automatic
        if context.strict and not expected:
            raise
        tell(str(error), context.key, expected)
        context.counters.add("compile_failures")
        from piecework.compile.eager import EagerCompiler  # here, since a stored program needs no compiler

        compiled, failure = EagerCompiler().compile(piece, context), error.reason
    record = PieceRecord(
        context.key, compiled.compiler, now() - start, context.cached, failure, lasting, context.automatic
    )
    return compiled, record


def tell(failure: str, key: str, expected: bool) -> None:
    """Log that the piece of this key runs uncompiled; a warning if a user wanted something else."""
    level = logging.INFO if expected else logging.WARNING
    log.log(level, "%s; the piece runs uncompiled (key %s)", failure, key[:12])
