"""A whole program as one call of the CPU's library: no Python runs between its pieces, however many."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from piecework.compile.chain_link import STEP, Cache, link_chain
from piecework.compile.native_calls import NativeCalls
from piecework.compile.native_piece import suited
from piecework.errors import PieceworkError
from piecework.graph.program import Program
from piecework.ops.attention_int8 import SCALE_DTYPE
from piecework.ops.cpu.attention import index_of


@dataclass(frozen=True)
class Addresses:
    """Where weights and the KV cache lie. `kept` holds that memory, whatever a parameter gets later."""

    packed: bytes
    kept: tuple[Tensor, ...]


class Chain:
    """Does what the program's pieces and paged attention do one by one, with the same results.

    Threads may run it at once: each has memory between calls, and addresses of its step, of its own.
    """

    def __init__(self, program: Program, cache_dtype: torch.dtype | None = None) -> None:
        """Link the program to a KV cache of `cache_dtype`, by default the program's own.

        One that can't run as one call is a NotChainedError.
        """
        self.plan = plan = link_chain(program, cache_dtype)
        self._program = program
        self._calls = NativeCalls(plan.calls, plan.arena)
        self._pack = struct.Struct(f"{len(plan.inputs) + 1 + len(STEP)}q").pack

    def addresses(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], *scales: Sequence[Tensor]
    ) -> Addresses:
        """Return what stays as it is from step to step.

        `keys` and `values` are the KV cache's layers, [pages, kv_heads, page_size, head_dim], and `scales`
        those of both in int8, [pages, kv_heads, page_size]. What doesn't fit the program is a PieceworkError.
        """
        weights, caches = self.plan.weights, self.plan.caches
        page_size = keys[caches[0].layer].shape[2] if caches else 0
        layers = [(cache, x[cache.layer]) for cache in caches for x in (keys, values, *filter(len, scales))]
        for cache, x in layers:
            _check(cache, x, page_size)
        places = [*(w.data_ptr() for w in weights), page_size, *(x.data_ptr() for _, x in layers)]
        kept = (*(w.detach() for w in weights), *(x.detach() for _, x in layers))
        return Addresses(struct.pack(f"{len(places)}q", *places), kept)

    def run(self, inputs: Sequence[Tensor], index: Sequence[Tensor], addresses: Addresses) -> Tensor:
        """Run a step of T tokens; returns the program's result, a new tensor.

        Args:
            inputs: the program's. One of other sizes or another dtype is an InputError.
            index: slots, page_table, query_starts and context_lengths, as for `paged_attention`.
            addresses: what `addresses` gave.
        """
        plan = self.plan
        self._program.check(inputs)
        tokens = inputs[plan.tokens].shape[0]
        given = zip(inputs, plan.inputs, strict=True)
        inputs = [x if s is None else suited(x, s, tokens, i) for i, (x, s) in enumerate(given)]
        index = [index_of(x) for x in index]
        shape = plan.result
        result = torch.empty_strided(shape.at(tokens), shape.strides, dtype=shape.dtype)
        places = [x.data_ptr() for x in (*inputs, result, *index)]
        self._calls.run(self._pack(*places, *index[1].shape) + addresses.packed, tokens)
        return result


def _check(cache: Cache, x: Tensor, page_size: int) -> None:
    own = x.dtype == cache.dtype and tuple(x.shape[1:]) == (cache.heads, page_size, cache.dim)
    scales = cache.dtype is torch.int8 and x.dtype == SCALE_DTYPE and x.shape[1:] == (cache.heads, page_size)
    if not own and not scales:
        raise PieceworkError(
            f"the program is not made for layer {cache.layer}'s KV cache, {x.dtype} {x.shape}"
        )
    if not x.is_contiguous():
        raise PieceworkError(f"layer {cache.layer}'s KV cache has gaps")
