"""Small models on several `sim` devices, with a list of everything that is asked of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, fx

from piecework.compile.base import CompileContext
from piecework.compile.eager import EagerCompiler
from piecework.devices.sim import SimDevice
from piecework.errors import DeviceError

Fn = Callable[..., Tensor | tuple[Tensor, ...]]


def trace(fn: Fn, *examples: Tensor) -> fx.GraphModule:
    """The function as a graph whose nodes know their values."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(lambda *xs: _tuple(fn(*xs)), tracing_mode="fake")(*examples)


class Rig:
    """Devices named `sim:0`, `sim:1`, ..., each with memory of its own.

    `events` gets `compile:sim:0`, `create:sim:0`, `run:sim:0` as they begin, with a piece's number behind
    where there is one. What is in `faults` fails: an event's name, for good, or a pair with the number of
    times that it works before.
    """

    def __init__(self, devices: int = 2, faults: Collection[str] = ()) -> None:
        self.names = [f"sim:{i}" for i in range(devices)]
        self.devices = {name: SimDevice(capacity=1 << 20) for name in self.names}
        self.events: list[str] = []
        self.faults = set(faults)
        self.seen: list[tuple[int, ...]] = []
        self._lock = threading.Lock()

    def happen(self, stage: str, device: str, piece: str = "") -> None:
        event = f"{stage}:{device}{piece}"
        with self._lock:
            self.events.append(event)
        if event in self.faults:
            raise DeviceError(device, stage, f"planned at {event}")

    def factory(self, graph: fx.GraphModule, piece: str = "", mutated: Sequence[int] = ()) -> Callable:
        def make(device: str) -> SimModel:
            return SimModel(self, device, graph, piece, mutated)

        return make


class SimModel:
    """A graph on a device; its inputs are copied there and its results back."""

    def __init__(
        self, rig: Rig, device: str, graph: fx.GraphModule, piece: str, mutated: Sequence[int]
    ) -> None:
        rig.happen("compile", device, piece)
        self.rig, self.device, self.piece_name = rig, device, piece
        self.piece = EagerCompiler().compile(graph, CompileContext(rig.devices[device]))
        self.execution_devices = (device,)
        self.mutated_inputs = tuple(mutated)

    def create_request(self) -> SimRequest:
        self.rig.happen("create", self.device, self.piece_name)
        return SimRequest(self)


class SimRequest:
    """Bindings, and a run of a piece on them."""

    def __init__(self, model: SimModel) -> None:
        self.model = model
        self.inputs: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}

    def set_input(self, index: int, tensor: Tensor) -> None:
        self.inputs[index] = tensor

    def set_output(self, index: int, tensor: Tensor) -> None:
        self.outputs[index] = tensor

    def output(self, index: int) -> Tensor:
        return self.outputs[index]

    def run(self) -> None:
        model, rig = self.model, self.model.rig
        given = [self.inputs[i] for i in sorted(self.inputs)]
        rig.seen.append(tuple(tensor.data_ptr() for tensor in given))
        if "spoil" in rig.faults:  # a run that fails half-way has written something already
            given[0].fill_(99)
        rig.happen("run", model.device, model.piece_name)
        device = rig.devices[model.device]
        results = device.launch(model.piece, [device.place(tensor) for tensor in given])
        for index, result in enumerate(results):
            self.outputs.setdefault(index, torch.empty_like(result)).copy_(result)


def _tuple(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
