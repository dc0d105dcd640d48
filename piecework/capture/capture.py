"""A program as captured graphs, size by size.

`piecewise`: each piece is a graph, holes run eagerly between them. `full`: one graph holds everything,
holes and, if there is one, the head too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torch import Tensor

from piecework.devices import Device
from piecework.devices.captured import CapturedGraph
from piecework.errors import CaptureError
from piecework.graph.counters import Counters
from piecework.graph.program import HoleCall, PieceCall, Program

Holes = Mapping[str, Callable[..., Any]]
Watched = Callable[[], Mapping[str, Tensor]]
"""Gives tensors that the graphs use although they are no inputs, by name: caches, metadata buffers."""


@dataclass(frozen=True)
class BoundHole:
    """A hole with the tensors it has at every replay of one size."""

    op: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Tensor | None

    def run(self, holes: Holes) -> None:
        """Fill the hole."""
        value = holes.get(self.op, self.function)(*self.args, **self.kwargs)
        if self.result is not None:
            self.result.copy_(value)


@dataclass
class Entry:
    """One captured size: what a replay does in order, and the addresses that it relies on."""

    actions: list[CapturedGraph | BoundHole]
    results: tuple[Tensor, ...]
    buffers: list[int]
    weights: list[int]
    checked: bool = False

    @property
    def graphs(self) -> list[CapturedGraph]:
        """The graphs among the actions, in order."""
        return [action for action in self.actions if isinstance(action, CapturedGraph)]


@dataclass
class CapturedProgram:
    """Captures `program` and replays it.

    Attributes:
        mode: piecewise or full.
        pool: of the device, shared by all graphs that never run at the same time.
        head: run on the program's result inside a full graph; its result is the second one.
        watched: further tensors whose addresses the graphs know.
        debug: check the addresses of weights at every replay, and not at the first one only.
    """

    program: Program
    device: Device
    mode: Literal["piecewise", "full"]
    pool: Any
    counters: Counters
    head: Program | None = None
    watched: Watched = dict
    debug: bool = False
    _entries: dict[int, Entry] = field(default_factory=dict, init=False)
    _results: list[Tensor] = field(default_factory=list, init=False)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The captured sizes, sorted."""
        return tuple(sorted(self._entries))

    @property
    def graphs_per_size(self) -> int:
        """How many graphs each size takes."""
        return 1 if self.mode == "full" else self.program.num_pieces

    def capture(self, size: int, inputs: Sequence[Tensor], holes: Holes) -> None:
        """Run twice on static `inputs` of `size` rows, the second time recording.

        The largest size comes first: smaller ones use its memory again.
        """
        made = self.device.warm_up(lambda: self._run(inputs, holes))
        results = self._static_results(size, made)
        del made
        if self.mode == "full":
            graph, _ = self.device.capture(lambda: self._run_into(results, inputs, holes), self.pool)
            actions: list[CapturedGraph | BoundHole] = [graph]
            self.counters.add("captures")
        else:
            actions = self._capture_pieces(inputs, holes, results)
        buffers, weights = _addresses(self._buffers(inputs)), _addresses(self._weights())
        self._entries[size] = Entry(actions, results, buffers, weights)

    def replay(
        self, size: int, inputs: Sequence[Tensor], holes: Holes, host: Mapping[str, Tensor] = {}
    ) -> tuple[Tensor, ...]:
        """Run a captured size on what its static inputs hold now.

        Holes of a full graph are inside it; `host` are then new values of its host arguments. The results
        stand in static buffers, until the next replay.

        Raises:
            CaptureError: a tensor that the graphs use moved since; it is named.
        """
        entry = self._entries[size]
        self._check(entry, inputs)
        for action in entry.actions:
            if isinstance(action, BoundHole):
                action.run(holes)
                continue
            if host:
                action.update(host).join()
            action.replay()
            self.counters.add("replays")
        return entry.results

    def release(self) -> None:
        """Give all graphs back to the device."""
        for entry in self._entries.values():
            for graph in entry.graphs:
                graph.release()
        self._entries.clear()
        self._results.clear()

    def _run(self, inputs: Sequence[Tensor], holes: Holes) -> tuple[Tensor, ...]:
        found = self.program.run(inputs, fills=holes)
        results = (found,) if isinstance(found, Tensor) else tuple(found)
        if self.head is not None:
            results += (self.head.run([results[0]]),)
        return results

    def _run_into(self, results: Sequence[Tensor], inputs: Sequence[Tensor], holes: Holes) -> None:
        _copy(self._run(inputs, holes), results)

    def _static_results(self, size: int, made: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return where the results of `size` go: tensors that leave the program outlive its pool memory."""
        if not self._results:
            self._results = [self.device.zeros(tuple(t.shape), t.dtype) for t in made]
        for kept, tensor in zip(self._results, made, strict=True):
            if tensor.shape[0] != size or size > kept.shape[0]:
                raise CaptureError(
                    f"a result of shape {list(tensor.shape)} at size {size} has no room in "
                    f"{list(kept.shape)}; results have a row per input row, and the largest size comes first"
                )
        return tuple(kept[:size] for kept in self._results)

    def _capture_pieces(
        self, inputs: Sequence[Tensor], holes: Holes, results: Sequence[Tensor]
    ) -> list[CapturedGraph | BoundHole]:
        """Capture piece by piece.

        `env` owns what pieces gave until its last use, as a run does: a tensor that crosses a hole must not
        lose its memory to the pieces behind the hole. What stays for replays, in `weak`, owns nothing, so
        that smaller sizes use the pool's memory again.
        """
        env = self.program.environment(inputs)
        weak = env.copy()
        actions: list[CapturedGraph | BoundHole] = []
        last = self.program.steps[-1]
        if not isinstance(last, PieceCall):
            raise CaptureError(f"a program that ends with the hole {last.op} can't be captured in pieces")
        for step in self.program.steps:
            if isinstance(step, HoleCall):
                step.run(env, holes.get(step.op))
                result = None if step.result is None else weak[step.result]
                actions.append(BoundHole(step.op, step.function, *step.arguments(weak), result))
            else:
                actions.append(self._capture_piece(step, env, weak, results if step is last else ()))
            for slot in step.frees:
                env[slot] = None
        return actions

    def _capture_piece(
        self, step: PieceCall, env: list[Any], weak: list[Any], results: Sequence[Tensor]
    ) -> CapturedGraph:
        graph, outputs = self.device.capture(partial(self._call, step, env, results), self.pool)
        self.counters.add("captures")
        for slot, tensor in zip(step.outputs, outputs, strict=True):
            env[slot] = tensor
            weak[slot] = self.device.weak_reference(tensor)
        return graph

    def _call(self, step: PieceCall, env: list[Any], results: Sequence[Tensor]) -> Sequence[Tensor]:
        outputs = self.device.launch(self.program.pieces[step.distinct], step.gather(env))
        if results:
            known = dict(zip(step.outputs, outputs, strict=True))
            _copy([known.get(slot, env[slot]) for slot in self.program.output_slots], results)
        return outputs

    def _buffers(self, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        return {**self.watched(), **dict(zip(self.program.inputs, inputs, strict=True))}

    def _weights(self) -> dict[str, Tensor]:
        bindings = (*self.program.bindings, *(self.head.bindings if self.head else ()))
        return {b.name: b.tensor for b in bindings if b.tensor is not None}

    def _check(self, entry: Entry, inputs: Sequence[Tensor]) -> None:
        """Compare addresses: buffers at every replay, weights, which are many, at the first one."""
        _compare(entry.buffers, self._buffers(inputs))
        if self.debug or not entry.checked:
            _compare(entry.weights, self._weights())
            entry.checked = True


def _addresses(tensors: Mapping[str, Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors.values()]


def _compare(captured: Sequence[int], tensors: Mapping[str, Tensor]) -> None:
    now = _addresses(tensors)
    if captured != now:
        moved = [name for name, old, new in zip(tensors, captured, now, strict=True) if old != new]
        raise CaptureError(
            f"{', '.join(moved)} moved after capture: the graphs read the address that it had then"
        )


def _copy(values: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    for value, result in zip(values, results, strict=True):
        result.copy_(value)
