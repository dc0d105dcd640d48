"""Compiles the distinct pieces of a program, at once where the compiler allows."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from torch import fx

from piecework.compile.base import CompileContext, CompiledPiece, CompileError, Compiler
from piecework.compile.eager import EagerCompiler

log = logging.getLogger("piecework.compile")


def compile_pieces(
    pieces: Sequence[fx.GraphModule],
    keys: Sequence[str],
    compiler: Compiler,
    context: CompileContext,
    *,
    threads: int | None = None,
) -> list[CompiledPiece]:
    """Compile pieces, each under its structural key; the results stand in the same order.

    A piece whose compiler fails runs uncompiled, with a warning that says why; in strict mode the first
    CompileError is raised. `threads`: how many compile at once; by default one per core.
    """
    contexts = [replace(context, key=key) for key in keys]
    for index in range(len(pieces)):
        context.device.notify("compile", index)
    workers = min(threads or os.cpu_count() or 1, len(pieces))
    if not compiler.parallel or workers < 2:
        return [_compile(piece, c, compiler) for piece, c in zip(pieces, contexts, strict=True)]
    with ThreadPoolExecutor(workers, thread_name_prefix="piecework-compile") as pool:
        return list(pool.map(_compile, pieces, contexts, [compiler] * len(pieces)))


def _compile(piece: fx.GraphModule, context: CompileContext, compiler: Compiler) -> CompiledPiece:
    try:
        compiled = compiler.compile(piece, context)
    except CompileError as error:
        if context.strict:
            raise
        log.warning("%s; the piece runs uncompiled (key %s)", error, context.key[:12])
        context.counters.add("compile_failures")
        return EagerCompiler().compile(piece, context)
    context.counters.add("compiles")
    return compiled
