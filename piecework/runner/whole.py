"""Whole-program mode: a compiler gets the decode step of one batch size in one piece, attention included."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from piecework.capture.buffers import StaticBuffers
from piecework.compile.base import CompileContext, CompiledPiece, CompileError, Compiler, first_line
from piecework.devices import Device
from piecework.graph.program import Program
from piecework.graph.whole import INDEX, with_paged_attention
from piecework.kvcache import AttentionMetadata, PagedKVCache
from piecework.profile import now

log = logging.getLogger("piecework.compile")


class WholeDecode:
    """Decode steps of exactly these sizes, each compiled with static shapes. Other batches run in pieces.

    The KV cache's tensors are inputs, looked up at each call; the page table has all its columns.
    """

    def __init__(
        self,
        body: Program,
        compiler: Compiler,
        sizes: Sequence[int],
        cache: PagedKVCache,
        buffers: StaticBuffers,
        context: CompileContext,
    ) -> None:
        """Compile every size, the largest first, and run each once, on a batch of nobody.

        Raises:
            CompileError: the compiler failed, what it made fails at its first run or gives something else
                than hidden states, or the model couldn't be traced.
        """
        if body.graph_module is None:
            raise CompileError(compiler.name, f"there is no graph to compile: {body.opaque_reason}")
        self.sizes = tuple(sorted(sizes))
        self._cache = cache
        self._buffers = buffers
        self._bindings = body.bindings
        index = {name: getattr(buffers, name) for name in INDEX}
        whole = with_paged_attention(body.graph_module.graph, {**index, **cache.tensors()})
        self._added = whole.added
        self._compiled: dict[int, CompiledPiece] = {}
        for size in reversed(self.sizes):
            start = now()
            self._compiled[size] = compiler.compile(whole.graph_module, replace(context, tokens=size))
            self._try(compiler, size, context.device)
            log.info("whole program of %d sequences compiled in %.1f s", size, now() - start)

    def __call__(self, size: int, inputs: dict[str, Tensor], metadata: AttentionMetadata) -> Tensor:
        """Run `size` sequences of one row on a program's inputs by name; returns hidden states [size, H]."""
        given = {**inputs, **{name: getattr(metadata, name) for name in INDEX}, **self._cache.tensors()}
        flat = [given[b.name] if b.tensor is None else b.tensor for b in self._bindings]
        hidden = self._compiled[size]([*flat, *(given[name] for name in self._added)])
        return hidden[0]

    def _try(self, compiler: Compiler, size: int, device: Device) -> None:
        """Find out now what a compiler says at the first call only."""
        self._buffers.load_nobody(size, sequences=True)
        try:
            with torch.inference_mode():
                self(size, self._buffers.inputs(size), self._buffers.metadata(size))
                device.synchronize()
        except CompileError:
            raise
        except Exception as error:
            reason = f"its program of {size} sequences fails at the first run: {first_line(error)}"
            raise CompileError(compiler.name, reason) from error
