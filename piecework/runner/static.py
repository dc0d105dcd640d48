"""Steps of the static strategy: a whole program for a chunk of a prompt, one for decode at each capacity."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from piecework.capture.head import HeadGraphs
from piecework.compile.base import CompileContext, CompileError, Compiler
from piecework.devices import Device
from piecework.devices.base import Phase
from piecework.errors import PieceworkError
from piecework.graph.program import Program
from piecework.graph.static import LEAST_OPEN, StaticGraphError, with_static_attention
from piecework.graph.symbols import evaluate, expression
from piecework.kvcache import AttentionMetadata, StaticKVCache
from piecework.layers.attention import AttentionSpec
from piecework.profile import now

log = logging.getLogger("piecework.compile")
_HIDDEN = 1  # results of the body before its keys and values
_BELOW_ALL = torch.finfo(torch.float32).min


class StaticShapeError(PieceworkError):
    """A tensor that doesn't have the one shape that a static program was compiled for."""


@dataclass
class _Inputs:
    """A program's own inputs, which stay where they are: ids, positions, rows, and a mask for each window."""

    input_ids: Tensor
    positions: Tensor
    num_valid_rows: Tensor
    masks: dict[int, Tensor]


class StaticBody:
    """The compiled body for `tokens` rows of a sequence, over a past of one capacity, or of any (None)."""

    def __init__(
        self,
        body: Program,
        compiler: Compiler,
        context: CompileContext,
        tokens: int,
        capacity: int | None,
        *,
        transpose_values: bool,
    ) -> None:
        """Compile. Raises CompileError, also where the model couldn't be traced."""
        if body.graph_module is None:
            raise CompileError(compiler.name, f"there is no graph to compile: {body.opaque_reason}")
        try:
            graph = with_static_attention(
                body.graph_module.graph, tokens, capacity, transpose_values=transpose_values
            )
        except StaticGraphError as error:
            raise CompileError(compiler.name, str(error)) from error
        self.tokens = tokens
        self.device: Device = context.device
        bindings = body.bindings
        self.weights = [b.tensor for b in bindings] + [None] * len(graph.added)
        self.names = [b.name for b in bindings] + list(graph.added)
        self._values = [n.meta["val"] for n in graph.graph_module.graph.find_nodes(op="placeholder")]
        context.calls = [tuple(self.weights)]
        start = now()
        self.piece = compiler.compile(graph.graph_module, context)
        context.counters.add("compiles")
        log.info("%d tokens over %s compiled in %.1f s", tokens, capacity or "any room", now() - start)

    def inputs(self, capacity: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return the shapes and types of all inputs, weights among them, over a past of this capacity."""
        found = []
        for val in self._values:
            sizes = [expression(size) for size in val.shape]
            shape = tuple(evaluate(s, dict.fromkeys(s.free_symbols, capacity)) for s in sizes)
            found.append((shape, val.dtype))
        return found


class StaticProgram:
    """The body at one size: `tokens` rows over a past with room for `capacity` tokens."""

    def __init__(self, body: StaticBody, specs: Sequence[AttentionSpec], capacity: int) -> None:
        self.tokens = body.tokens
        self.capacity = capacity
        self.piece = body.piece
        self._body = body
        self._device = body.device
        self._shapes = body.inputs(capacity)
        self._inputs = self._allocate(sorted({spec.window for spec in specs}))

    def run(
        self, input_ids: Tensor, positions: Tensor, past: Mapping[str, Tensor]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Run n rows, at most `tokens`, of one sequence, which stand behind those in `past`.

        Returns hidden states [n, H], and keys and values by layer, of which the first n are meant.
        """
        count, own = input_ids.shape[0], self._inputs
        for buffer, values in ((own.input_ids, input_ids), (own.positions, positions)):
            buffer[:count].copy_(values)
            buffer[count:].zero_()
        own.num_valid_rows.fill_(count)
        start = int(positions[0])
        for window, mask in own.masks.items():
            self._fill_past(mask, window, start)
        named = {**vars(own), **{f"mask.{w}": mask for w, mask in own.masks.items()}, **past}
        flat = [
            self._checked(name, named[name], like) if weight is None else weight
            for name, weight, like in zip(self._body.names, self._body.weights, self._shapes, strict=True)
        ]
        results = self._device.launch(self.piece, flat)
        rest = (len(results) - _HIDDEN) // 2 + _HIDDEN
        return results[0][:count], list(results[_HIDDEN:rest]), list(results[rest:])

    def _allocate(self, windows: Sequence[int]) -> _Inputs:
        def ints(count: int) -> Tensor:
            return self._device.zeros((count,), torch.int64)

        masks: dict[int, Tensor] = {}
        row, column = torch.arange(self.tokens)[:, None], torch.arange(self.tokens)
        for window in windows:
            mask = self._device.zeros((self.tokens, self.capacity + self.tokens), torch.float32)
            hidden = (column > row) | ((column <= row - window) if window else False)
            mask[:, self.capacity :].masked_fill_(hidden.to(mask.device), _BELOW_ALL)
            masks[window] = mask
        return _Inputs(ints(self.tokens), ints(self.tokens), ints(1), masks)

    def _fill_past(self, mask: Tensor, window: int, start: int) -> None:
        """Let rows from the position `start` on see the `start` tokens before it, or those in the window."""
        past = mask[:, : self.capacity]
        past.fill_(_BELOW_ALL)
        if not window:
            past[:, :start] = 0
            return
        for row in range(min(self.tokens, window - 1)):  # those behind see none of the past
            past[row, max(0, start + row - window + 1) : start] = 0

    def _checked(self, name: str, tensor: Tensor, like: tuple[tuple[int, ...], torch.dtype]) -> Tensor:
        shape, dtype = like
        if tensor.shape != shape or tensor.dtype is not dtype or not tensor.is_contiguous():
            has = f"{tuple(tensor.shape)} {tensor.dtype} {tensor.stride()}"
            raise StaticShapeError(f"{name} is {has}, and not {shape} {dtype}, contiguous")
        return tensor


class StaticSteps:
    """Runs batches over a static cache, one sequence after the other. It stands where a GraphRunner does."""

    def __init__(
        self,
        body: Program,
        head: HeadGraphs,
        compiler: Compiler,
        context: CompileContext,
        specs: Sequence[AttentionSpec],
        cache: StaticKVCache,
    ) -> None:
        """Compile all programs. Raises CompileError."""
        self.head = head
        self._cache = cache
        self._device = context.device
        self._counters = context.counters
        self._layers = len(specs)
        self._count = 0

        def make(tokens: int, sizes: Sequence[int]) -> dict[int, StaticProgram]:
            transposed = cache.value_dim == 3
            shared = [s for s in sizes if s >= LEAST_OPEN] if context.device.open_capacity else []
            compiled: dict[int | None, StaticBody] = {}
            made: dict[int, StaticProgram] = {}
            for size in sizes:
                capacity = None if len(shared) > 1 and size in shared else size
                if capacity not in compiled:
                    compiled[capacity] = StaticBody(
                        body, compiler, context, tokens, capacity, transpose_values=transposed
                    )
                made[size] = StaticProgram(compiled[capacity], specs, size)
            return made

        capacities = cache.capacities
        largest = capacities.largest
        self.decode = make(1, capacities.sizes)
        self.prefill = make(capacities.chunk, (largest,))[largest] if capacities.chunk > 1 else None

    @property
    def programs(self) -> list[StaticProgram]:
        """All programs, that of prefill first."""
        return [*([self.prefill] if self.prefill else []), *self.decode.values()]

    def run(
        self,
        phase: Phase,
        input_ids: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        rows: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Run a batch; see GraphRunner. Nothing of a sequence is written before its program has run."""
        step, self._count = self._count, self._count + 1
        self._device.notify("step", step)
        starts, stops = metadata.query_starts.tolist(), metadata.context_lengths.tolist()
        slots, drawn = metadata.page_table[:, 0].tolist(), set(rows)
        made: list[Tensor] = []
        for slot, first, end, stop in zip(slots, starts[:-1], starts[1:], stops, strict=True):
            made.append(
                self._sequence(slot, input_ids[first:end], positions[first:end], stop, end - 1 in drawn)
            )
        hidden = made[0] if len(made) == 1 else torch.cat(made)
        logits = self.head(hidden[list(rows)]) if rows else None
        self._device.notify("done", step, [hidden] if logits is None else [hidden, logits])
        return hidden, logits

    def release(self) -> None:
        """Give the head's graphs back; there are none of the body."""
        self.head.release()

    def _sequence(self, slot: int, input_ids: Tensor, positions: Tensor, stop: int, drawn: bool) -> Tensor:
        """Run a sequence's next tokens, up to the position `stop`."""
        cache, capacities, count = self._cache, self._cache.capacities, input_ids.shape[0]
        prefill = self.prefill if count > 1 else None
        program = prefill or self.decode[capacities.variant(stop)]
        start, room = stop - count, program.capacity
        cache.arrange(slot, room, start, prefill=prefill is not None)
        past: dict[str, Tensor] = {}
        for layer in range(self._layers):
            past[f"keys.{layer}"] = cache.keys(layer, slot, room)
            past[f"values.{layer}"] = cache.values(layer, slot, room)
        hidden, keys, values = program.run(input_ids, positions, past)
        self._counters.add("whole_runs")
        self._counters.add("padded_tokens", program.tokens - count)
        if prefill and drawn:
            # The prompt is complete: its past chunks move, and the last one is written where it will stay.
            cache.arrange(slot, capacities.variant(min(stop + 1, capacities.largest)), start)
        cache.write(slot, count, keys, values)
        return hidden
