"""A model that is audited against another one, and gives way to it where its results are wrong.

    model = audited(create(["openvino:NPU", "openvino:CPU"], factory), factory("cpu"), "cpu")

It looks like the model itself; see `piecework.failsafe.element`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from piecework.errors import ConfigError, PieceworkError
from piecework.failsafe.aliases import written_inputs
from piecework.failsafe.audit import Audit, AuditPolicy, AuditReport, nrmse
from piecework.failsafe.element import Model, Request


def audited(
    model: Model, reference: Model, name: str, policy: AuditPolicy | None = None, *, outputs: int = 1
) -> AuditedModel:
    """Audit `model` against `reference`, which the log calls `name`, by its first `outputs` outputs.

    Raises ConfigError for a model that writes its inputs: the reference would read what that one wrote.
    """
    for one in (model, reference):
        if one.mutated_inputs:
            raise ConfigError("mutated_inputs", list(one.mutated_inputs), "none, where a model is audited")
    return AuditedModel(model, reference, Audit(policy or AuditPolicy(), name), outputs)


class AuditedModel:
    """A model beside its reference. After a miss, old requests and new ones run on the reference."""

    def __init__(self, model: Model, reference: Model, audit: Audit, outputs: int) -> None:
        self.model = model
        self.reference = reference
        self.audit = audit
        self.outputs = outputs

    @property
    def switched(self) -> bool:
        """True where the reference has taken over."""
        return self.audit.ended is not None

    @property
    def execution_devices(self) -> tuple[str, ...]:
        """Where it runs."""
        return (self.reference if self.switched else self.model).execution_devices

    @property
    def mutated_inputs(self) -> Sequence[int]:
        """None."""
        return ()

    @property
    def report(self) -> AuditReport:
        """What was found so far."""
        return self.audit.report()

    def create_request(self) -> AuditedRequest:
        """Make an execution context; the reference's part is made when it is needed."""
        return AuditedRequest(self)


class AuditedRequest:
    """An execution context with its own bindings; tensors that the caller bound keep their identity."""

    def __init__(self, model: AuditedModel) -> None:
        self._model = model
        self._inputs: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        self._inner: Request | None = None if model.switched else model.model.create_request()
        self._reference: Request | None = None

    def set_input(self, index: int, tensor: Tensor) -> None:
        """Read input `index` from this tensor, at each run."""
        self._inputs[index] = tensor
        for request in (self._inner, self._reference):
            if request is not None:
                request.set_input(index, tensor)

    def set_output(self, index: int, tensor: Tensor) -> None:
        """Write output `index` into this tensor, at each run."""
        self._outputs[index] = tensor
        if self._inner is not None:
            self._inner.set_output(index, tensor)

    def output(self, index: int) -> Tensor:
        """Return the tensor with output `index`, the same one for as long as nobody binds another."""
        if index not in self._outputs:
            source = self._inner if self._inner is not None else self._on_reference()
            self._outputs[index] = source.output(index)
        return self._outputs[index]

    def run(self) -> None:
        """Run on the bound tensors; the results of a miss are the reference's already.

        Raises PieceworkError where an audited run's outputs share memory with its inputs.
        """
        if self._model.switched or self._inner is None:
            self._inner = None
            self._on_reference().run()
            self._take()
            return
        due = self._model.audit.due()
        if due and (shared := written_inputs(self._inputs, self._outputs, ())):
            raise PieceworkError(f"an audited run writes its inputs {shared}: bind outputs of their own")
        self._inner.run()
        if due:
            self._audit(self._inner)

    def _audit(self, inner: Request) -> None:
        model, reference = self._model, self._on_reference()
        reference.run()
        pairs = [(self.output(i), reference.output(i)) for i in range(model.outputs)]
        errors = [nrmse(*pair) for pair in pairs]
        worst = next(filter(math.isnan, errors), max(errors))
        (device, *_) = model.model.execution_devices
        miss = model.audit.judge(device, worst)
        if miss is not None and model.audit.policy.switch:
            model.audit.end(miss.reason)
            self._inner = None
            self._take()

    def _on_reference(self) -> Request:
        """Return the reference's context, whose outputs are its own: results are compared first."""
        if self._reference is None:
            self._reference = self._model.reference.create_request()
            for index, tensor in self._inputs.items():
                self._reference.set_input(index, tensor)
        return self._reference

    def _take(self) -> None:
        """Give the caller's tensors what the reference found."""
        for index, tensor in self._outputs.items():
            found = self._on_reference().output(index)
            if found is not tensor:
                tensor.copy_(found)
