"""Runs batches through captured graphs where one fits, and through the program itself where none does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from piecework.capture.buffers import StaticBuffers
from piecework.capture.capture import CapturedProgram, Watched
from piecework.capture.head import HeadGraphs
from piecework.capture.options import CaptureOptions
from piecework.capture.plan import CapturePlan, Cost, Wish, plan_captures
from piecework.capture.quiet import collector_at_rest
from piecework.capture.sizes import padded_size
from piecework.devices import Device
from piecework.devices.base import Phase
from piecework.errors import CaptureError
from piecework.graph.counters import Counters
from piecework.graph.program import HoleFn, Program
from piecework.kvcache import AttentionMetadata

log = logging.getLogger("piecework.capture")

Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor, AttentionMetadata], None]
"""attend(layer, q, k, v, out, metadata) writes `out`, and zeroes its rows behind the last sequence's."""
Chained = Callable[[Sequence[Tensor], AttentionMetadata], Tensor]
"""chained(inputs, metadata) runs the program with attention filled in, as one call."""


class Whole(Protocol):
    """Decode as one call of a compiler's program, for batches of exactly these `sizes`."""

    sizes: tuple[int, ...]

    def __call__(self, size: int, inputs: dict[str, Tensor], metadata: AttentionMetadata) -> Tensor:
        """Run on static buffers by name; returns hidden states [size, H]."""


@dataclass(frozen=True)
class Captured:
    """One size that was captured: the program's name in the plan, graphs made, bytes of the device taken."""

    name: str
    size: int
    graphs: int
    bytes: int


class GraphRunner:
    """Executes batches on one device, in the graph mode of their phase."""

    def __init__(
        self,
        program: Program,
        head: Program,
        device: Device,
        options: CaptureOptions,
        buffers: StaticBuffers,
        attend: Attend,
        *,
        counters: Counters,
        head_counters: Counters,
        watched: Watched = dict,
        chained: Chained | None = None,
        whole: Whole | None = None,
        debug: bool = False,
        strict: bool = False,
    ) -> None:
        """Capture nothing yet.

        Args:
            buffers: as large as the largest size that will be captured.
            attend: fills attention; called at every step for eager holes, only at capture for full graphs.
            watched: names tensors that `attend` uses, the KV cache, so that a move is noticed.
            chained: runs the program outside graphs; None where that goes piece by piece.
            whole: runs decode of its sizes; None where there is no such program.
            debug: check all addresses at every replay.
            strict: a batch that no graph has room for, in a phase that captures, is an error.
        """
        self.program = program
        self.device = device
        # A model that could not be traced has no pieces, so there is nothing to capture.
        self.options = CaptureOptions("eager", "eager") if program.opaque_reason else options
        self.counters = counters
        self._attend = attend
        self._chained = chained
        self._whole = whole
        self._buffers = buffers
        self._strict = strict
        self._steps = 0
        self._reported: set[str] = set()
        pool = device.new_pool() if device.captures else None

        def everything() -> Mapping[str, Tensor]:
            return {**buffers.tensors(), **watched()}

        def captured(mode: Any, inside: Program | None) -> CapturedProgram:
            return CapturedProgram(program, device, mode, pool, counters, inside, everything, debug)

        self.full = captured("full", head)
        self.pieces = captured("piecewise", None)
        self.head = HeadGraphs(head, device, pool, head_counters, debug)

    def plan(self, memory_budget: int | None = None, cost: Cost | None = None) -> CapturePlan:
        """Plan the captures of this runner, and log the plan."""
        plan = plan_captures(
            self.wishes, graph_budget=self.device.graph_budget, memory_budget=memory_budget, cost=cost
        )
        said = plan.lines()
        if plan.graphs or plan.dropped:
            log.info("%s", said[0])
        for line in said[1:]:
            log.warning("%s", line)
        return plan

    @property
    def wishes(self) -> list[Wish]:
        """Which programs should be captured, at which sizes."""
        wishes = self.options.wishes(self.program.num_pieces)
        return [wish for wish in wishes if wish.name != "head" or not self.head.program.opaque_reason]

    def capture(self, plan: CapturePlan) -> list[Captured]:
        """Capture the plan's sizes, the largest first, in one pool."""
        work = sorted(((size, name) for name, sizes in plan.sizes.items() for size in sizes), reverse=True)
        made: list[Captured] = []
        with torch.inference_mode(), collector_at_rest():
            for size, name in work:
                free, graphs = self.device.free_memory(), self._captures
                self._capture_size(name, size)
                taken = free - self.device.free_memory()
                made.append(Captured(name, size, self._captures - graphs, taken))
        return made

    def release(self) -> None:
        """Give all graphs back to the device."""
        for captured in (self.full, self.pieces):
            captured.release()
        self.head.release()

    @torch.inference_mode()
    def run(
        self,
        phase: Phase,
        input_ids: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        rows: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Run a batch of T tokens.

        In the phase `decode` every sequence has one row. Returns hidden states [T, H] and the logits
        [R, V] of `rows`, None where there are none; both may be overwritten by the next step.

        Raises:
            CaptureError: a tensor that graphs read moved, or, when strict, no graph has room for the batch.
        """
        step, self._steps = self._steps, self._steps + 1
        self.device.notify("step", step)
        hidden, logits = self._run(phase, input_ids, positions, metadata, rows)
        self.device.notify("done", step, [hidden] if logits is None else [hidden, logits])
        return hidden, logits

    def _run(
        self,
        phase: Phase,
        input_ids: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        rows: Sequence[int],
    ) -> tuple[Tensor, Tensor | None]:
        count = input_ids.shape[0]
        if self._whole is not None and phase == "decode":
            if count in self._whole.sizes:
                hidden = self._run_whole(self._whole, input_ids, positions, metadata)
                return hidden, self.head(_pick(hidden, rows)) if rows else None
            self._report_uncaptured(phase, count, self._whole.sizes)
        mode = self.options.decode if phase == "decode" else self.options.prefill
        exact = phase == "decode" and not self.options.decode_padding
        size = padded_size(self.full.sizes, count, exact=exact) if mode == "full" else None
        if size is not None:
            return self._replay_full(size, input_ids, positions, metadata, rows)
        size = padded_size(self.pieces.sizes, count, exact=exact) if mode != "eager" else None
        if size is not None:
            hidden = self._replay_pieces(size, input_ids, positions, metadata)
        else:
            if mode != "eager":
                self._report_uncaptured(phase, count)
            hidden = self._run_eager(input_ids, positions, metadata)
        return hidden, self.head(_pick(hidden, rows)) if rows else None

    def _replay_full(
        self,
        size: int,
        input_ids: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        rows: Sequence[int],
    ) -> tuple[Tensor, Tensor | None]:
        count = input_ids.shape[0]
        self._buffers.load(input_ids, positions, size)
        self._buffers.load_metadata(metadata, size)
        self.counters.add("padded_tokens", size - count)
        host = self._buffers.host_arguments(size)
        hidden, logits = self.full.replay(size, self._static_inputs(size), {}, host)
        return hidden[:count], _pick(logits[:count], rows) if rows else None

    def _run_whole(
        self, whole: Whole, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        count = input_ids.shape[0]
        self._buffers.load(input_ids, positions, count)
        self._buffers.load_metadata(metadata, count)
        self.counters.add("whole_runs")
        return whole(count, self._buffers.inputs(count), self._buffers.metadata(count))

    def _replay_pieces(
        self, size: int, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        count = input_ids.shape[0]
        self._buffers.load(input_ids, positions, size)
        self.counters.add("padded_tokens", size - count)
        (hidden,) = self.pieces.replay(size, self._static_inputs(size), self._holes(metadata))
        return hidden[:count]

    def _run_eager(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        self.counters.add("eager_runs")
        valid = torch.full((1,), input_ids.shape[0], dtype=torch.int64, device=input_ids.device)
        named = {"input_ids": input_ids, "positions": positions, "num_valid_rows": valid}
        # A model that could not be traced is called as it is.
        names = ("input_ids", "positions") if self.program.opaque_reason else self.program.inputs
        inputs = [named[name] for name in names]
        if self._chained is not None:
            self.counters.add("chained_runs")
            return self._chained(inputs, metadata)
        hidden: Tensor = self.program.run(inputs, self._fill(metadata))
        return hidden

    def _fill(self, metadata: AttentionMetadata) -> HoleFn:
        def fill(layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
            self._attend(layer, q, k, v, out, metadata)

        return fill

    def _holes(self, metadata: AttentionMetadata) -> dict[str, Callable[..., Any]]:
        return self.program.holes(self._fill(metadata))

    def _static_inputs(self, size: int) -> list[Tensor]:
        named = self._buffers.inputs(size)
        return [named[name] for name in self.program.inputs]

    @property
    def _captures(self) -> int:
        return self.counters.captures + self.head.counters.captures

    def _capture_size(self, name: str, size: int) -> None:
        """Capture on a batch of nobody: rows without a sequence, or one token each on the dummy page."""
        nobody = self._buffers.metadata(0)
        self._buffers.load_nobody(size, sequences=name == "full")
        if name == "full":
            self.full.capture(size, self._static_inputs(size), self._holes(self._buffers.metadata(size)))
        elif name == "piecewise":
            self.pieces.capture(size, self._static_inputs(size), self._holes(nobody))
        else:
            row: Tensor = self.program.run(self._static_inputs(1), self._fill(nobody))
            self.head.capture(size, row)

    def _report_uncaptured(self, phase: Phase, count: int, exact: Sequence[int] = ()) -> None:
        largest = max((*self.full.sizes, *self.pieces.sizes), default=0)
        why = f"the largest captured size is {largest}"
        if phase == "decode" and not self.options.decode_padding:
            why = "none was captured at this size, and decode_padding is off"
        reason = f"{phase} of {count} rows runs without a graph; {why}"
        if exact:
            sizes = ", ".join(map(str, exact))
            reason = f"{phase} of {count} rows runs in pieces; there are whole programs of exactly {sizes}"
        if self._strict:
            raise CaptureError(reason)
        if phase not in self._reported:
            self._reported.add(phase)
            log.warning("%s", reason)


def _pick(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    if len(rows) == tensor.shape[0] and all(row == i for i, row in enumerate(rows)):
        return tensor
    return tensor[list(rows)]
