"""Graphs: recorded launches of `sim`, and calls in them that wait for an update before each replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from piecework.devices.sim.graph import Launch, SimGraph
from piecework.devices.sim.record import Recorder
from torch_npu._machine import GRAPHS, machine
from torch_npu.npu.streams import Stream
from torch_npu.npu.utils import current_stream, stream, synchronize

_UPDATABLE = ("npu_fused_infer_attention_score.default",)


def graph_pool_handle() -> Any:
    """Make a pool."""
    return machine().memory.new_pool()


class _Record:
    """A captured call whose keyword arguments can be replaced; `waiting` until they are."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.waiting = True

    def replace(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if name in self.launch.kwargs:  # others pass in silence, as in the real package
                self.launch.kwargs[name] = list(value)
        self.waiting = False


class _GraphDispatchMode(TorchDispatchMode):
    """Notes which of the recorded launches can be updated."""

    def __init__(self) -> None:
        super().__init__()
        self.graph_dispatch_records: list[_Record] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        recorder = machine().recorder
        if func.__name__ in _UPDATABLE and recorder is not None:
            self.graph_dispatch_records.append(_Record(recorder.launches[-1]))
        return found

    def update_capture_record(self, cpu_update_input: list[dict[str, Any]]) -> None:
        """Replace arguments of the records, in order; one entry stands for all."""
        records = self.graph_dispatch_records
        many = cpu_update_input * len(records) if len(cpu_update_input) == 1 else cpu_update_input
        if len(many) != len(records):
            raise RuntimeError(f"{len(records)} operators need an update, and {len(many)} are given")
        for record, values in zip(records, many, strict=True):
            record.replace(values)


class NPUGraph:
    """A graph that is recorded between `capture_begin` and `capture_end`."""

    def __init__(self) -> None:
        self.graph_dispatch_mode = _GraphDispatchMode()
        self.auto_dispatch_capture = False
        self._recording = ExitStack()
        self._graph: SimGraph | None = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """Record what the current stream, which isn't the default one, is given."""
        if current_stream() is machine().streams[0]:
            raise RuntimeError("the default stream can't be captured")
        if machine().recorder is not None:
            raise RuntimeError("a capture is running already")
        if machine().graphs >= GRAPHS:
            raise RuntimeError("the device has no stream left for another graph")
        recorder = Recorder(
            machine().memory, pool or graph_pool_handle(), host_arguments=True, host_reads=True
        )
        machine().recorder = recorder
        self._recording.enter_context(recorder.recording())

    def capture_end(self) -> None:
        """Make a graph of what was recorded."""
        npu = machine()  # which another may have replaced when the graph goes
        recorder = npu.recorder
        assert recorder is not None
        self._recording.close()
        npu.recorder = None
        npu.graphs += 1
        overhead = npu.memory.allocate(4096)

        def count_down() -> None:
            npu.graphs -= 1

        self._graph = SimGraph(npu.memory, recorder.launches, recorder.free_at_start, overhead, count_down)

    def replay(self) -> None:
        """Run it, which ends only where every call that can be updated was."""
        assert self._graph is not None
        records = self.graph_dispatch_mode.graph_dispatch_records
        if any(record.waiting for record in records):
            raise RuntimeError("the stream hangs: it waits for the event of an update that nobody made")
        self._graph.replay()
        for record in records:
            record.waiting = True

    def reset(self) -> None:
        """Destroy it."""
        if self._graph is not None:
            self._graph.release()
            self._graph = None

    def update(self, cpu_update_input: list[dict[str, Any]]) -> None:
        """Replace host arguments."""
        if not self.auto_dispatch_capture:
            raise RuntimeError("the graph was captured without auto_dispatch_capture=True")
        self.graph_dispatch_mode.update_capture_record(cpu_update_input)


class graph:
    """Captures what runs inside."""

    def __init__(
        self,
        npu_graph: NPUGraph,
        pool: Any = None,
        stream: Stream | None = None,
        auto_dispatch_capture: bool = False,
        capture_error_mode: str = "global",
    ) -> None:
        self._graph = npu_graph
        self._pool = pool
        self._stream = stream or Stream()
        self._mode = capture_error_mode
        npu_graph.auto_dispatch_capture = auto_dispatch_capture
        self._inside = ExitStack()

    def __enter__(self) -> None:
        synchronize()
        self._inside.enter_context(stream(self._stream))
        self._graph.capture_begin(self._pool, self._mode)
        self._inside.callback(self._graph.capture_end)
        if self._graph.auto_dispatch_capture:  # the mode that is entered last sees a call first
            self._inside.enter_context(self._graph.graph_dispatch_mode)

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        self._inside.close()
