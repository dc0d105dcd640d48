"""Recorded graphs: what a step asks of one worker, so that one message runs it from then on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from piecework.errors import PieceworkError
from piecework.workers.endpoint import Region, Scalar
from piecework.workers.tasks.deferred import Deferred
from piecework.workers.tasks.handles import Handle
from piecework.workers.tasks.members import Calls, Member, Resident

INSTALL, PLAY, DROP = "plan:install", "plan:play", "plan:drop"
_NUMBERS = count(1)


class PlanError(PieceworkError):
    """A graph that can't be recorded, or a plan whose memory is not what it was."""


@dataclass(frozen=True)
class Input:
    """A host tensor whose storage goes to a region each time."""

    tensor: Deferred
    region: Region
    resident: Resident


@dataclass
class Recorder:
    """Listens to an orchestration. Anything that a plan can't do is a PlanError at once."""

    inputs: Mapping[int, Tensor]
    member: Member | None = None
    calls: list[tuple[str, list[Scalar | Region]]] = field(default_factory=list)
    fed: dict[int, Input] = field(default_factory=dict)
    weights: dict[int, tuple[Deferred, Resident, int]] = field(default_factory=dict)
    results: list[tuple[Handle, Tensor]] = field(default_factory=list)
    owned: list[Handle] = field(default_factory=list)

    def call(self, member: Member, digest: str, arguments: Sequence[Scalar | Region]) -> None:
        """Note a task."""
        self._on(member)
        if self.results:
            raise PlanError("a plan's results are copied after its last task")
        if any(isinstance(a, bytes) for a in arguments):
            raise PlanError("a plan's scalars are fixed, and none is bytes")
        self.calls.append((digest, list(arguments)))

    def tensor(self, member: Member, tensor: Deferred) -> None:
        """Note a deferred tensor that a task takes: an input, or memory that stays as it is."""
        self._on(member)
        resident = member.residents[tensor.id]
        if tensor.id not in self.inputs:
            if tensor.upload:  # else the host's contents are not what tasks read
                self.weights.setdefault(tensor.id, (tensor, resident, tensor.version))
        elif tensor.id not in self.fed:
            whole = tensor.bytes()
            self.fed[tensor.id] = Input(
                tensor, Region(resident.buffer, 0, (whole.nbytes,), torch.uint8), resident
            )

    def copy_in(self) -> None:
        """Refuse a copy of something that is no input."""
        raise PlanError("only declared inputs go to the worker in a plan; defer them")

    def copy_out(self, member: Member, source: Handle, target: Tensor) -> None:
        """Note a result."""
        self._on(member)
        self.results.append((source, target))

    def _on(self, member: Member) -> None:
        if self.member not in (None, member):
            raise PlanError("a plan runs on one worker")
        self.member = member


class Plan:
    """A recorded graph on its worker. It is valid as long as the memory that it names is there."""

    def __init__(self, recorder: Recorder) -> None:
        """Install what was recorded; raises what the worker raises."""
        if recorder.member is None or not recorder.calls:
            raise PlanError("a plan has at least one task")
        missing = [i for i in recorder.inputs if i not in recorder.fed]
        if missing:
            raise PlanError(f"{len(missing)} declared inputs were given to no task")
        self.number = next(_NUMBERS)
        self.member = recorder.member
        self.generation = self.member.endpoint.generation
        self._dropped = False
        self.results = recorder.results
        self.owned = recorder.owned
        self._inputs = list(recorder.fed.values())
        self._weights = list(recorder.weights.values())
        regions: list[Region] = [fed.region for fed in self._inputs]
        calls = []
        for digest, arguments in recorder.calls:
            calls.append([digest, [_place(a, regions) for a in arguments]])
        said = json.dumps({"calls": calls, "inputs": len(self._inputs)})
        self._buffers = {region.buffer for region in regions} | {h.id for h, _ in self.results}
        self.member.run(INSTALL, [self.number, said, *regions]).result()

    def why_stale(self) -> str | None:
        """Say why it can't run any more; None while it can."""
        if self._dropped:
            return "it was dropped"
        if not self.member.alive(self.generation):
            return f"{self.member.name} was restarted or died"
        if not self.member.memory.holds(self.generation, self._buffers):
            return "memory that it uses was freed"
        for weight, resident, version in self._weights:
            if resident.version != version or weight.version != version:
                return f"{weight.name} has new contents"
        return None

    def run(self) -> None:
        """Send the inputs as they are now, run the tasks, and wait for the results in their host tensors."""
        stale = self.why_stale()
        if stale is not None:
            raise PlanError(f"plan {self.number} is stale: {stale}")
        payload = b"".join(fed.tensor.bytes().numpy().tobytes() for fed in self._inputs)
        futures: list[Future[None]] = [self.member.run(PLAY, [self.number, payload])]
        futures += [self.member.copy_from(handle, host) for handle, host in self.results]
        for future in futures:
            future.result()
        for fed in self._inputs:
            fed.resident.version = fed.tensor.version

    def drop(self) -> None:
        """Let the worker forget it, and give back what it owns; a second call does nothing."""
        if self._dropped:
            return
        self._dropped = True
        if self.member.alive(self.generation):
            self.member.run(DROP, [self.number]).result()
        owned, self.owned = self.owned, []
        for handle in owned:
            if self.member.memory.holds(handle.generation, [handle.id]):
                self.member.discard(handle, "its plan was dropped")


@dataclass(frozen=True)
class _Installed:
    calls: list[tuple[Callable[..., None], list[Any]]]
    inputs: list[Tensor]


class PlanBook:
    """The worker's side: keeps plans with their tensors, and runs one when asked."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._plans: dict[int, _Installed] = {}

    def install(self, number: int, said: str, *tensors: Tensor) -> None:
        """Take a plan: its calls, and the tensors that they name by place."""
        plan = json.loads(said)
        calls = [
            (self._calls[digest], [tensors[value] if kind == "tensor" else value for kind, value in places])
            for digest, places in plan["calls"]
        ]
        self._plans[number] = _Installed(calls, list(tensors[: plan["inputs"]]))

    def play(self, number: int, payload: bytes) -> None:
        """Put the inputs into their places and make the calls."""
        plan = self._plans[number]
        data, start = torch.frombuffer(bytearray(payload), dtype=torch.uint8), 0
        for tensor in plan.inputs:
            tensor.copy_(data[start : start + tensor.nbytes])
            start += tensor.nbytes
        for call, arguments in plan.calls:
            call(*arguments)

    def drop(self, number: int) -> None:
        """Forget a plan."""
        del self._plans[number]


def with_plans(calls: Calls) -> Calls:
    """Return the functions that a worker is started with, and those that run plans of them."""
    book = PlanBook(calls)
    return {**calls, INSTALL: book.install, PLAY: book.play, DROP: book.drop}


def _place(argument: Scalar | Region, regions: list[Region]) -> tuple[str, Any]:
    if not isinstance(argument, Region):
        return ("scalar", argument)
    if argument not in regions:
        regions.append(argument)
    return ("tensor", regions.index(argument))
