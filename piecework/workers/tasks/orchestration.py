"""One run of tasks: scopes, limits, and how arguments become nodes of the graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from piecework.config.rings import RINGS
from piecework.profile import now
from piecework.workers.endpoint import Region, Scalar
from piecework.workers.tasks.arguments import Allocate, TaskArgs, Value
from piecework.workers.tasks.deferred import Deferred
from piecework.workers.tasks.functions import Function
from piecework.workers.tasks.graph import Access, Node, TaskGraph
from piecework.workers.tasks.handles import Handle, check_host, check_size
from piecework.workers.tasks.limits import Rings
from piecework.workers.tasks.members import Member
from piecework.workers.tasks.plans import Recorder
from piecework.workers.tasks.residents import remember, resolve, settle
from piecework.workers.tasks.tags import Parameter, Tag

HOST = "host"
Bound = Sequence[tuple[Parameter, Value]]


@dataclass
class _Scope:
    ring: int
    tasks: list[tuple[Node, int, int]] = field(default_factory=list)  # node, tasks, edges
    outputs: dict[Hashable, tuple[Member, Handle]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Call:
    """A task of one member, ready to be put into the graph."""

    member: Member
    digest: str
    arguments: list[Scalar | Region]
    accesses: list[Access]
    deferred: list[tuple[Deferred, Tag]]
    outputs: dict[str, Handle]
    before: list[Callable[[], None]] = field(default_factory=list)  # put back what is known of residents


class Orchestration:
    """Takes tasks, copies and releases of one thread until it is finished."""

    def __init__(self, members: Sequence[Member], rings: Rings, recorder: Recorder | None = None) -> None:
        """`recorder` hears what is submitted; outputs are its own, and not given back."""
        self.graph = TaskGraph()
        self._recorder = recorder
        self._members = {member.name: member for member in members}
        self._rings = rings
        self._scopes = [_Scope(0)]
        self._heap: dict[Hashable, tuple[int, int]] = {}
        self._count = 0

    def submit(
        self, function: Function, args: Sequence[TaskArgs], members: Sequence[Member]
    ) -> list[Mapping[str, Handle]]:
        """Submit a call of `function` to each of `members`, as one node: all start together, or none.

        Returns the allocated outputs of each, by parameter.
        """
        bound = [one.bind(function) for one in args]
        ring = self._scopes[-1].ring
        for member, values in zip(members, bound, strict=True):
            _check_handles(member, values)
        sizes = [_output_bytes(values) for values in bound]
        self._room("task-window", ring, len(members))
        self._room("heap", ring, sum(sizes))
        calls: list[_Call] = []
        try:
            for member, values in zip(members, bound, strict=True):
                calls.append(_Call(member, function.digest, [], [], [], {}))
                self._fill(calls[-1], values)
            self._count += 1
            where = ", ".join(member.name for member in members)
            name = f"task {self._count} ({function.name} on {where})"
            node = Node(name, lambda: _start(calls))
            self._settle(node, calls)
            self._note(calls)
            self._add(node, [access for call in calls for access in call.accesses], len(members))
        except BaseException:
            self._take_back(calls)
            raise
        return [call.outputs for call in calls]

    def copy_to(self, member: Member, target: Handle, source: torch.Tensor) -> None:
        """Copy a host tensor to a worker, after who reads or writes either of them."""
        member.check(target)
        check_host(source, target)
        if self._recorder is not None:
            self._recorder.copy_in()
        node = Node(f"copy to {member.name}", lambda: [member.copy_to(target, source)], (source,))
        accesses = [_host(source, Tag.INPUT), _device(member, target, Tag.OUTPUT_EXISTING)]
        self._add(node, accesses, 1)

    def copy_from(self, member: Member, source: Handle, target: torch.Tensor) -> None:
        """Copy from a worker to a host tensor, after the task that makes the data."""
        member.check(source)
        check_host(target, source)
        if self._recorder is not None:
            self._recorder.copy_out(member, source, target)
        node = Node(f"copy from {member.name}", lambda: [member.copy_from(source, target)], (target,))
        self._add(node, [_device(member, source, Tag.INPUT), _host(target, Tag.OUTPUT_EXISTING)], 1)

    def resolve(self, member: Member, tensor: Deferred, tag: Tag) -> Handle:
        """Return the device memory of a deferred tensor, which is made and filled if need be."""
        return resolve(member, tensor, tag, lambda whole, h: self._upload(member, tensor, whole, h))

    def free(self, member: Member, handle: Handle) -> None:
        """Give a buffer back once nobody uses it; its handles are refused from now on."""
        member.check(handle)
        self._drop(member, handle, "it was freed")

    def keep(self, member: Member, handle: Handle) -> None:
        """Take an output out of its scope: it stays until it is freed."""
        member.check(handle)
        key = member.key(handle)
        for scope in self._scopes:
            scope.outputs.pop(key, None)
        ring, nbytes = self._heap.pop(key, (0, 0))
        self._rings.take("heap", ring, -nbytes)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Hold the body's tasks and outputs until its end only, in the limits of the next depth."""
        scope = _Scope(min(len(self._scopes), RINGS - 1))
        self._scopes.append(scope)
        try:
            yield
        finally:
            self._scopes.remove(scope)
            self._leave(scope)

    def finish(self) -> BaseException | None:
        """Wait for everything, give back what scopes hold, and return the first failure with its notes."""
        while self._scopes:
            self._leave(self._scopes.pop())
        self.graph.drain()
        return self.graph.error()

    def _take_back(self, calls: Sequence[_Call]) -> None:
        """Undo what was done for a task that is not submitted after all."""
        for call in calls:
            for put_back in call.before:  # nobody writes what was taken for written
                put_back()
            for handle in call.outputs.values():
                self._drop(call.member, handle, "its task was not submitted")

    def _fill(self, call: _Call, values: Bound) -> None:
        """Put a call's arguments in, which are allocated and uploaded where need be."""
        member = call.member
        for parameter, value in values:
            if parameter.tag is None:
                assert not isinstance(value, Handle | Deferred | Allocate)
                call.arguments.append(value)
                continue
            if isinstance(value, Allocate):
                handle = call.outputs[parameter.name] = self._allocate(member, value)
            elif isinstance(value, Deferred):
                call.before.append(remember(member, value))
                handle = self.resolve(member, value, parameter.tag)
                call.deferred.append((value, parameter.tag))
            else:
                assert isinstance(value, Handle)
                handle = value
            call.arguments.append(handle.region)
            call.accesses.append(_device(member, handle, parameter.tag))

    def _allocate(self, member: Member, output: Allocate) -> Handle:
        scope = self._scopes[-1]
        nbytes = check_size(output.shape, output.dtype)
        generation, buffer = member.malloc(nbytes)
        handle = Handle(member.name, generation, buffer, tuple(output.shape), output.dtype)
        key = member.key(handle)
        scope.outputs[key] = (member, handle)
        self._heap[key] = (scope.ring, nbytes)
        self._rings.take("heap", scope.ring, nbytes)
        return handle

    def _upload(self, member: Member, tensor: Deferred, whole: torch.Tensor, target: Handle) -> None:
        node = Node(f"upload of {tensor.name} to {member.name}", lambda: [member.copy_to(target, whole)])
        node.keeps = (whole,)
        node.after.append(lambda: settle(member, tensor, Tag.OUTPUT_EXISTING, node.failed))
        accesses = [_host(whole, Tag.INPUT), _device(member, target, Tag.OUTPUT_EXISTING)]
        self._add(node, accesses, 1)

    def _settle(self, node: Node, calls: Sequence[_Call]) -> None:
        def after() -> None:
            for call in calls:
                for tensor, tag in call.deferred:
                    settle(call.member, tensor, tag, node.failed)

        if any(call.deferred for call in calls):
            node.after.append(after)

    def _note(self, calls: Sequence[_Call]) -> None:
        if self._recorder is None:
            return
        for call in calls:
            for tensor, _ in call.deferred:
                self._recorder.tensor(call.member, tensor)
            self._recorder.call(call.member, call.digest, call.arguments)

    def _add(self, node: Node, accesses: Sequence[Access], tasks: int) -> None:
        scope = self._scopes[-1]
        while self.graph.progress():
            pass
        self._room("task-window", scope.ring, tasks)
        edges = len(self.graph.predecessors(accesses))
        self._room("dep-pool", scope.ring, edges)
        self._rings.take("task-window", scope.ring, tasks)
        self._rings.take("dep-pool", scope.ring, edges)
        scope.tasks.append((node, tasks, edges))
        self.graph.add(node, accesses)

    def _room(self, resource: str, ring: int, amount: int) -> None:
        """Wait until `amount` fits, as long as something runs that may make room and the time isn't over."""
        until = now() + self._rings.limits.timeout
        while not self._rings.fits(resource, ring, amount):
            hopeless = amount > self._rings.limits.of(resource)[ring] or not self.graph.unfinished
            if hopeless or not self.graph.progress(max(until - now(), 0.001)):
                raise self._rings.error(resource, ring, amount)

    def _drop(self, member: Member, handle: Handle, why: str) -> None:
        for scope in self._scopes:
            scope.outputs.pop(member.key(handle), None)
        self._release(member, handle, why)

    def _release(self, member: Member, handle: Handle, why: str) -> None:
        key = member.key(handle)
        generation, buffer = handle.generation, handle.id
        ring, nbytes = self._heap.pop(key, (0, 0))
        if self._recorder is not None and nbytes:
            self._recorder.owned.append(handle)
            self._rings.take("heap", ring, -nbytes)
            return
        member.memory.drop(generation, buffer, why)

        def free() -> tuple[()]:
            member.free(generation, buffer)
            return ()

        node = Node(f"release of buffer {buffer} of {member.name}", free)
        node.after.append(lambda: self._rings.take("heap", ring, -nbytes))
        node.after.append(lambda: self.graph.forget(key))
        size = 2**62  # to the end of the buffer, wherever that is
        self.graph.add(node, [Access(key, 0, size, Tag.OUTPUT_EXISTING)])

    def _leave(self, scope: _Scope) -> None:
        for member, handle in list(scope.outputs.values()):
            self._release(member, handle, "its scope ended")
        for node, tasks, edges in scope.tasks:
            give = self._giver(scope.ring, tasks, edges)
            if node.finished:
                give()
            else:
                node.after.append(give)

    def _giver(self, ring: int, tasks: int, edges: int) -> Callable[[], None]:
        def give() -> None:
            self._rings.take("task-window", ring, -tasks)
            self._rings.take("dep-pool", ring, -edges)

        return give


def _start(calls: Sequence[_Call]) -> list[Future[None]]:
    """Start the members of a group, or none of them where one is gone."""
    for call in calls:
        call.member.check_alive()
    return [call.member.run(call.digest, call.arguments) for call in calls]


def _check_handles(member: Member, values: Bound) -> None:
    for _, value in values:
        if isinstance(value, Handle):
            member.check(value)
        elif isinstance(value, Allocate):
            check_size(value.shape, value.dtype)


def _output_bytes(values: Bound) -> int:
    return sum(check_size(v.shape, v.dtype) for _, v in values if isinstance(v, Allocate))


def _device(member: Member, handle: Handle, tag: Tag) -> Access:
    return Access(member.key(handle), handle.offset, handle.offset + handle.nbytes, tag)


def _host(tensor: torch.Tensor, tag: Tag) -> Access:
    return Access(HOST, tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, tag)
