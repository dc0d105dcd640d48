"""A model on an ordered list of devices that looks like a model on one.

    model = create(["openvino:NPU", "openvino:CPU"], factory)
    request = model.create_request()
    request.set_input(0, tokens)
    request.run()
    hidden = request.output(0)

Whatever a factory makes has the form of `Model`. With one device there is no wrapper around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from piecework.errors import ConfigError, DeviceError
from piecework.failsafe.aliases import written_inputs
from piecework.failsafe.errors import RetryRefusedError
from piecework.failsafe.events import Event
from piecework.failsafe.failover import Active, Factory, Failover
from piecework.failsafe.policy import Policy


class Request(Protocol):
    """An execution context. Tensors are bound by index; one that the caller bound is used as it is."""

    def set_input(self, index: int, tensor: Tensor) -> None:
        """Read input `index` from this tensor, at each run."""

    def set_output(self, index: int, tensor: Tensor) -> None:
        """Write output `index` into this tensor, at each run."""

    def output(self, index: int) -> Tensor:
        """Return the tensor with output `index`: the caller's where one is bound."""

    def run(self) -> None:
        """Run on the bound tensors."""


class Model(Protocol):
    """A compiled model. `execution_devices` is where it runs, `mutated_inputs` are those that a run writes
    without an output that says so."""

    @property
    def execution_devices(self) -> tuple[str, ...]: ...

    @property
    def mutated_inputs(self) -> Sequence[int]: ...

    def create_request(self) -> Request:
        """Make an execution context."""


M = TypeVar("M", bound=Model)


def create(
    devices: Sequence[str], factory: Factory[M] | None, policy: Policy | None = None
) -> M | FailsafeModel[M]:
    """Make a model that survives its device.

    With one device, or where the policy is `off`, the result is what the factory makes, with its own errors.

    Raises:
        ConfigError: no device or no factory.
        DeviceError: the only device's factory made nothing.
        ExhaustedError: no device could make the model.
    """
    policy = policy or Policy()
    if factory is None:
        raise ConfigError("factory", factory, "a function that makes a model on a device, given its name")
    if not devices:
        raise ConfigError("devices", list(devices), "at least one device")
    if len(devices) > 1 and policy.failover != "off":
        return FailsafeModel(Failover(devices, factory, policy))
    model = factory(devices[0])
    if model is None:
        raise DeviceError(devices[0], "compile", "the factory made nothing")
    return model


class FailsafeModel(Generic[M]):
    """A model with a `Failover` behind it; several threads may use it, each with requests of its own."""

    def __init__(self, failover: Failover[M]) -> None:
        self.failover = failover

    @property
    def active_device(self) -> str:
        """The device in use; never waits."""
        return self.failover.active.device

    @property
    def is_at_last_device(self) -> bool:
        """True where there is no device to move to any more."""
        return self.failover.is_at_last_device

    @property
    def execution_devices(self) -> tuple[str, ...]:
        """Where the active model runs."""
        return self.failover.active.model.execution_devices

    @property
    def mutated_inputs(self) -> Sequence[int]:
        """Those of the active model."""
        return self.failover.active.model.mutated_inputs

    @property
    def events(self) -> tuple[Event, ...]:
        """All moves, in order."""
        return self.failover.events

    def create_request(self) -> FailsafeRequest[M]:
        """Make an execution context; a device that can't is moved from."""
        return FailsafeRequest(self.failover)


class FailsafeRequest(Generic[M]):
    """An execution context that follows its model from device to device, with its own bindings.

    An output that was handed out keeps its identity, so that it may be bound as the input of another
    request: later runs write into it, whichever device does them.
    """

    def __init__(self, failover: Failover[M]) -> None:
        self._failover = failover
        self._inputs: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        self._active, self._inner = self._create()

    def set_input(self, index: int, tensor: Tensor) -> None:
        """Read input `index` from this tensor, at each run, on whichever device."""
        self._heal()
        self._inner.set_input(index, tensor)
        self._inputs[index] = tensor

    def set_output(self, index: int, tensor: Tensor) -> None:
        """Write output `index` into this tensor, at each run, on whichever device."""
        self._heal()
        self._inner.set_output(index, tensor)
        self._outputs[index] = tensor

    def output(self, index: int) -> Tensor:
        """Return the tensor with output `index`, the same one for as long as nobody binds another."""
        if index not in self._outputs:
            self._outputs[index] = self._inner.output(index)
        return self._outputs[index]

    def run(self) -> None:
        """Run on the bound tensors, on the next device if this one fails.

        Raises:
            ExhaustedError: no device is left.
            RetryRefusedError: the run may have written its inputs before it failed, and has no snapshot.
        """
        while True:
            self._heal()
            active, policy = self._active, self._failover.policy
            written = written_inputs(self._inputs, self._outputs, active.model.mutated_inputs)
            saved = {i: self._inputs[i].clone() for i in written} if policy.snapshot else {}
            try:
                self._inner.run()
                return
            except Exception as error:
                if not policy.moves(error, "run"):
                    raise
                found = self._failover.advance(active.generation, "run", error)
                if written and not saved:
                    raise RetryRefusedError(found.device, written) from error
            for index, before in saved.items():
                self._inputs[index].copy_(before)

    def _heal(self) -> None:
        """Have a context of the active model, with this request's tensors bound."""
        while self._active.generation != self._failover.active.generation:
            active, inner = self._create()
            for index, tensor in self._inputs.items():
                inner.set_input(index, tensor)
            for index, tensor in self._outputs.items():
                inner.set_output(index, tensor)
            self._active, self._inner = active, inner

    def _create(self) -> tuple[Active[M], Request]:
        active = self._failover.active
        while True:
            try:
                return active, active.model.create_request()
            except Exception as error:
                if not self._failover.policy.moves(error, "create"):
                    raise
                active = self._failover.advance(active.generation, "create", error)
