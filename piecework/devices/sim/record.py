"""The recorder of `sim`: sees each operation of a capture and gives its results addresses in the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from piecework.devices.sim.graph import Launch, tensors_of
from piecework.devices.sim.memory import Pool, SimMemory
from piecework.devices.sim.ranges import intersect, subtract
from piecework.errors import CaptureError

# Reading a value on the host waits for the device, which a capture can't: its work has not run yet.
_HOST_READS = frozenset(
    {
        Tensor.item,
        Tensor.tolist,
        Tensor.numpy,
        Tensor.cpu,
        Tensor.__bool__,
        Tensor.__int__,
        Tensor.__float__,
        Tensor.__index__,
        Tensor.__array__,
    }
)
# Their result has no defined contents, so nothing of it is recorded: the block stays poisoned.
_UNINITIALISED = ("aten::empty", "aten::new_empty")  # and their variants: empty_like, empty_strided, ...


class Recorder(TorchDispatchMode):
    """Records operations as launches on exact addresses.

    Every tensor that an operation reads must lie in the device's memory, else the replay would not see
    later values. With `host_arguments` integer tensors elsewhere are host arguments: their values are
    frozen, as the arguments of a recorded kernel call are. A host tensor without dimensions is a number,
    which a kernel takes by value on every device. With `host_reads` Python may read host tensors, of which
    the record knows nothing.
    """

    def __init__(self, memory: SimMemory, pool: Pool, host_arguments: bool, host_reads: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: list[Launch] = []
        self._memory = memory
        self._pool = pool
        self._host_arguments = host_arguments
        self._guard = _HostReadGuard(self._foreign if host_reads else _never)
        memory.settle()
        self.free_at_start = pool.free.snapshot()
        # Free ranges that hold poison at this point of a replay. New memory of the pool does not: other
        # graphs write there.
        self._poisoned = self.free_at_start

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what happens inside."""
        with self._guard, self:
            yield

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation once, and write down how to run it again."""
        name = func.name()
        _refuse_host_reads(name, func, args)
        named = _argument_names(func)
        return self._record(name, func, list(args), dict(kwargs or {}), named)

    def record_opaque(self, piece: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Record a call whose inside can't be seen as one operation."""

        def run(*flat: Tensor) -> Sequence[Tensor]:
            return piece(flat)

        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            names = {i: f"input {i}" for i in range(len(inputs))}
            return list(self._record("opaque piece", run, list(inputs), {}, names))
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]

    def _record(
        self,
        name: str,
        fn: Callable[..., Any],
        args: list[Any],
        kwargs: dict[str, Any],
        names: dict[int, str],
    ) -> Any:
        self._memory.settle()
        free = self._pool.free.snapshot()
        freed = subtract(free, self._poisoned)
        host = self._host_places(name, args, kwargs, names)
        with self._guard.paused():
            returned = fn(*args, **kwargs)
        if not all(isinstance(value, Tensor) for value in tensors_of(returned)):
            raise CaptureError(f"{name} gives the host a value, for which it would have to wait")
        on_host = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs)) if self._foreign(t)}
        results: list[Tensor | None] = []

        def settle_down(result: Tensor) -> Tensor:
            if self._memory.holds(result) or result.untyped_storage().data_ptr() in on_host:
                results.append(None)  # a view, or an argument
                return result
            block = self._memory.empty_like(result, self._pool)
            if not name.startswith(_UNINITIALISED):
                block.copy_(result)
            results.append(self._memory.alias(block))
            return block

        returned = _map(settle_down, returned)
        recorded_args = _map(self._recorded, args)
        recorded_kwargs = _map(self._recorded, kwargs)
        launch = Launch(name, fn, recorded_args, recorded_kwargs, results, host, freed)
        if name.startswith(_UNINITIALISED):
            launch = Launch(name, _nothing, [], {}, [], {}, freed)
        self.launches.append(launch)
        self._poisoned = intersect(free, self._pool.free.snapshot())
        return returned

    def _foreign(self, value: Any) -> bool:
        return isinstance(value, Tensor) and not self._memory.holds(value)

    def _recorded(self, tensor: Tensor) -> Tensor:
        return self._memory.alias(tensor) if self._memory.holds(tensor) else tensor.clone()

    def _host_places(
        self, name: str, args: list[Any], kwargs: dict[str, Any], names: dict[int, str]
    ) -> dict[str, int | str]:
        """Find host arguments; a tensor that is neither one nor on the device is refused."""

        def outside(value: Any) -> bool:
            return self._foreign(value) and value.dim() > 0

        places: dict[str, int | str] = {names[i]: i for i, arg in enumerate(args) if outside(arg)}
        places |= {key: key for key, arg in kwargs.items() if outside(arg)}
        for tensor in filter(outside, _tensors((args, kwargs))):
            if not self._host_arguments or tensor.is_floating_point():
                where = ", ".join(places) or "an argument"
                raise CaptureError(f"{name} reads a tensor outside of the device's memory ({where})")
        return places


def _map(fn: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply `fn` to the tensors in what an operation takes or gives: sequences and dicts of them."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, list):
        return [_map(fn, v) for v in value]
    if isinstance(value, tuple):
        return tuple(_map(fn, v) for v in value)
    if isinstance(value, dict):
        return {key: _map(fn, v) for key, v in value.items()}
    return value


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _map(note, value)
    return found


def _nothing() -> None:
    return None


def _never(value: Any) -> bool:
    return False


def _argument_names(func: Any) -> dict[int, str]:
    return {i: argument.name for i, argument in enumerate(func._schema.arguments)}


def _refuse_host_reads(name: str, func: Any, args: Sequence[Any]) -> None:
    dynamic = torch.Tag.dynamic_output_shape in func.tags
    if dynamic and name.startswith("aten::index"):
        dynamic = any(t.dtype == torch.bool for t in _tensors(args))
    if torch.Tag.data_dependent_output in func.tags or dynamic:
        raise CaptureError(f"{name} waits for a value of the device, so it can't be captured")


class _HostReadGuard(TorchFunctionMode):
    """Refuses Python reads of values, some of which never reach the dispatcher on CPU tensors."""

    def __init__(self, readable: Callable[[Any], bool]) -> None:
        super().__init__()
        self._readable = readable
        self._depth = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Allow everything inside: an operation may do there what it likes."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Refuse host reads; all else passes."""
        if self._depth == 0 and func in _HOST_READS and not self._readable(args[0]):
            raise CaptureError(f"{func.__name__} waits for a value of the device, so it can't be captured")
        return func(*args, **(kwargs or {}))
