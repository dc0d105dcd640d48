"""A worker: what programs and orchestrations call, whatever is below it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from piecework.errors import ConfigError, PieceworkError
from piecework.workers.tasks.arguments import TaskArgs
from piecework.workers.tasks.deferred import Deferred, TensorIds
from piecework.workers.tasks.functions import Function, Functions
from piecework.workers.tasks.handles import Handle, check_size
from piecework.workers.tasks.inline import inline
from piecework.workers.tasks.limits import Limits, Rings
from piecework.workers.tasks.members import Child, Member
from piecework.workers.tasks.orchestration import Orchestration
from piecework.workers.tasks.plans import Plan, PlanError, Recorder
from piecework.workers.tasks.residents import collect
from piecework.workers.tasks.roster import Context, Roster
from piecework.workers.tasks.tags import Tag

CHIP, NODE, RACK = LEVELS = (2, 3, 4)
"""One device; workers of devices; workers of those."""


@dataclass
class Recording:
    """What `record` gives: a plan, as soon as its body has run."""

    made: Plan | None = None

    @property
    def plan(self) -> Plan:
        """The plan; a PlanError before the body has ended."""
        if self.made is None:
            raise PlanError("the plan is there after the body of `record`")
        return self.made


class Worker:
    """A worker of one level: 2 is a device, 3 has devices below it, 4 has workers of level 3.

    Tasks, copies and memory operations inside `orchestrate` become a graph, and outside run at once. One
    thread orchestrates at a time; others wait for it.

        with Worker(3, [inline("cpu", "a"), inline("cpu", "b")], functions=[gemm]) as worker:
            with worker.orchestrate():
                out = worker.submit_next_level(gemm, TaskArgs(x=worker.defer(x), y=Allocate(...)), worker=1)
                worker.copy_from(out["y"], host)
    """

    def __init__(
        self,
        level: int,
        children: Sequence[Child] = (),
        *,
        subs: Sequence[Child] = (),
        functions: Sequence[Function] = (),
        limits: Limits | None = None,
    ) -> None:
        """Make a worker; nothing is started.

        Args:
            children: of the level below. A worker of level 2 has one, itself: on the CPU if none is given.
            subs: children that run plain Python on the host.

        Raises:
            ConfigError: a level that there isn't, or children of another one.
        """
        if level not in LEVELS:
            raise ConfigError("level", level, "one of " + ", ".join(map(str, LEVELS)))
        children = children or ([inline()] if level == CHIP else [])
        below = [getattr(child, "level", CHIP) for child in children]
        if not children or (level == CHIP and len(children) > 1):
            raise ConfigError("children", len(children), "one for level 2, and at least one above it")
        if level > CHIP and any(one != level - 1 for one in below):
            raise ConfigError("children", below, f"workers of level {level - 1}, for one of level {level}")
        self.level = level
        self.functions = Functions(functions)
        self.limits = limits or Limits()
        self._rings = Rings(self.limits)
        self._roster = Roster(children, subs)
        self._ids = TensorIds()
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._run: Orchestration | None = None
        self._closed = False

    def start(self) -> Worker:
        """Start all children; a second call does nothing. When one doesn't start, the others are closed."""
        self._check_open()
        if self._roster.members:
            return self
        try:
            self._roster.start(self.functions.close())
        except BaseException:
            self.close()
            raise
        return self

    def close(self, deadline: float = 5.0) -> None:
        """End all workers below, within `deadline` seconds for all; what runs fails. May be repeated."""
        self._closed = True
        self._roster.close(deadline)

    def __enter__(self) -> Worker:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def healthy(self) -> bool:
        """Whether it is started and not closed, and nobody below is gone."""
        return not self._closed and self._roster.healthy

    @property
    def runs_here(self) -> bool:
        """Whether the calling thread does tasks of this worker; it can't wait for others of them."""
        return self._roster.runs_here

    @property
    def contexts(self) -> tuple[Context, ...]:
        """What is known of each child, the plain Python ones last."""
        below = self.level - 1 if self.level > CHIP else CHIP
        return self._roster.contexts(below, self.limits)

    @property
    def high_water(self) -> dict[str, list[int]]:
        """Return the most that was held of each limited resource, by ring."""
        return {resource: list(marks) for resource, marks in self._rings.high_water.items()}

    @contextmanager
    def orchestrate(self) -> Iterator[Worker]:
        """Run the body's tasks as a graph, and wait for all of them at its end.

        Raises the first failure, with notes of later ones. Outputs that nobody kept are gone afterwards.
        """
        with self._orchestration(None):
            yield self

    @contextmanager
    def record(self, inputs: Sequence[torch.Tensor]) -> Iterator[Recording]:
        """Run the body's tasks as a graph, and make a plan of them, which one message runs from then on.

        Args:
            inputs: host tensors, deferred in the body, whose contents go to the worker at each run.

        Raises:
            PlanError: the body does what a plan can't: two workers, copies to them of anything but inputs.
        """
        recorder = Recorder({self._ids.defer(tensor).id: tensor for tensor in inputs})
        recording = Recording()
        try:
            with self._orchestration(recorder):
                yield recording
            recording.made = Plan(recorder)
        except BaseException:
            for handle in recorder.owned:
                self._roster.named(handle.worker).discard(handle, "its recording failed")
            raise

    @contextmanager
    def _orchestration(self, recorder: Recorder | None) -> Iterator[None]:
        self._check_started()
        if self._owner == threading.get_ident():
            raise PieceworkError("this thread orchestrates already; open a scope inside it")
        if self.runs_here:
            raise PieceworkError("a task can't orchestrate the worker that runs it: both would wait for ever")
        with self._lock:
            self._rings.clear()
            run = self._run = Orchestration(self._roster.members, self._rings, recorder)
            self._owner = threading.get_ident()
            try:
                for ident in self._ids.expired():
                    for member in self._roster.members:
                        collect(member, [ident])
                yield
            except BaseException as error:
                failure = run.finish()
                if failure is not None and failure is not error:
                    error.add_note(f"a task had failed before: {type(failure).__name__}: {failure}")
                raise
            else:
                failure = run.finish()
                if failure is not None:
                    raise failure
            finally:
                self._owner = self._run = None

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Hold the body's tasks and outputs only until its end."""
        with self._current().scope():
            yield

    def submit_next_level(self, function: Function, args: TaskArgs, worker: int = 0) -> Mapping[str, Handle]:
        """Submit a task to a worker of the next level; returns its allocated outputs by parameter."""
        self._check_level("submit_next_level")
        return self._submit(function, [args], [self._roster.child(worker)])[0]

    def submit_group(
        self, function: Function, args: Sequence[TaskArgs], workers: Sequence[int]
    ) -> list[Mapping[str, Handle]]:
        """Submit one task to several workers: all members start, together, or none does."""
        self._check_level("submit_group")
        if len(args) != len(workers) or not workers or len(set(workers)) < len(workers):
            raise ConfigError("workers", list(workers), f"{len(args)} different ones, as there are arguments")
        return self._submit(function, args, [self._roster.child(worker) for worker in workers])

    def submit_sub(self, function: Function, args: TaskArgs, sub: int = 0) -> Mapping[str, Handle]:
        """Submit a task to a plain Python child."""
        return self._submit(function, [args], [self._roster.sub(sub)])[0]

    def run(self, function: Function, args: TaskArgs) -> None:
        """Run a task on this worker's own device, and wait for it."""
        if self.level != CHIP:
            raise ConfigError("level", self.level, "2 for `run`; from 3 on there is run_next_level")
        with self._orchestrated():
            self._submit(function, [args], [self._roster.child(0)])

    def run_next_level(self, function: Function, args: TaskArgs, worker: int = 0) -> None:
        """Run a task on a worker of the next level and wait for it; on level 2 it is `run`."""
        if self.level == CHIP:
            self.run(function, args)
            return
        with self._orchestrated():
            self.submit_next_level(function, args, worker)

    def malloc(self, shape: Sequence[int], dtype: torch.dtype, worker: int | str = 0) -> Handle:
        """Allocate a tensor on a worker; it stays until it is freed, or the worker ends."""
        with self._orchestrated():
            member = self._roster.child(worker) if isinstance(worker, int) else self._roster.named(worker)
            generation, buffer = member.malloc(check_size(shape, dtype))
            return Handle(member.name, generation, buffer, tuple(shape), dtype)

    def free(self, handle: Handle) -> None:
        """Give back the buffer of a handle, once nobody uses it; handles of it are refused at once."""
        with self._orchestrated() as run:
            run.free(self._roster.named(handle.worker), handle)

    def keep(self, handle: Handle) -> None:
        """Let an output outlive its scope; it stays until it is freed."""
        self._current().keep(self._roster.named(handle.worker), handle)

    def copy_to(self, target: Handle, source: torch.Tensor) -> None:
        """Copy a dense CPU tensor of the handle's shape and dtype to it."""
        with self._orchestrated() as run:
            run.copy_to(self._roster.named(target.worker), target, source)

    def copy_from(self, source: Handle | Deferred, target: torch.Tensor, worker: int = 0) -> None:
        """Copy to a dense CPU tensor; `worker` says where a deferred tensor's device memory is."""
        with self._orchestrated() as run:
            if isinstance(source, Deferred):
                source = run.resolve(self._roster.child(worker), source, Tag.INPUT)
            run.copy_from(self._roster.named(source.worker), source, target)

    def defer(
        self,
        tensor: torch.Tensor,
        *,
        upload: bool = True,
        require_existing: bool = False,
        name: str = "tensor",
    ) -> Deferred:
        """Let a host tensor stand for device memory that is made on first use; see Deferred."""
        return self._ids.defer(tensor, upload=upload, require_existing=require_existing, name=name)

    def changed(self, tensor: torch.Tensor) -> None:
        """Say that a tensor's contents are new where torch doesn't see it."""
        self._ids.changed(tensor)

    def _submit(
        self, function: Function, args: Sequence[TaskArgs], members: Sequence[Member]
    ) -> list[Mapping[str, Handle]]:
        self.functions.check(function)
        return self._current().submit(function, args, members)

    @contextmanager
    def _orchestrated(self) -> Iterator[Orchestration]:
        """The open orchestration of this thread, or one for this operation alone."""
        if self._owner == threading.get_ident():
            yield self._current()
            return
        with self.orchestrate():
            yield self._current()

    def _current(self) -> Orchestration:
        if self._run is None or self._owner != threading.get_ident():
            raise PieceworkError("tasks are submitted inside `with worker.orchestrate()`")
        return self._run

    def _check_level(self, what: str) -> None:
        if self.level == CHIP:
            raise ConfigError("level", self.level, f"at least {NODE} for {what}: a device has no next level")

    def _check_open(self) -> None:
        if self._closed:
            raise PieceworkError("the worker is closed")

    def _check_started(self) -> None:
        self._check_open()
        if not self._roster.members:
            raise PieceworkError("the worker is not started")
