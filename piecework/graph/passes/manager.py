"""Runs passes over a traced graph, in order, and says what they did."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, GraphModule

from piecework.compilation import DEFAULT_SPLITTING_OPS
from piecework.graph.passes.aliases import inputs_of
from piecework.graph.passes.arguments import op_name
from piecework.graph.passes.base import AT_LEAST_ONE, EACH_LAYER, Pass, PassContext
from piecework.graph.passes.canonicalise import CANONICALISE
from piecework.graph.passes.cleanup import remove_dead
from piecework.graph.passes.equivalence import shared_memory, write_order
from piecework.graph.passes.errors import PassError, VerificationError
from piecework.graph.passes.fakes import copy_graph, propagate, refresh, same_result
from piecework.graph.passes.report import PassReport, Report, histogram, rewritten
from piecework.graph.passes.verify import verify as verify_rewrite
from piecework.profile import now

log = logging.getLogger("piecework.passes")


class PassManager:
    """An ordered list of passes.

        pm = PassManager(graph_module)
        pm.add(SomePass, eps=1e-5)
        print(pm.apply().table())

    Args:
        graph_module: a flat traced graph of ATen and named ops; `apply` may name another one.
        device: the kind of device that the graph is for.
        dtype: the weights' dtype; None takes the most frequent one of the graph's inputs.
        layers: the number of layers; None takes the number of splitting ops in the graph.
        splitting_ops: the ops between pieces.
        parameters: values from the model's configuration, that passes may ask for by name.
        example_inputs: values for the placeholders of a graph that has no fake values.
        verify: run every rewrite on random inputs, and undo it if it changes more than it declares.
        strict: make a missed expectation, a refused and a failed pass an error.
    """

    def __init__(
        self,
        graph_module: GraphModule | None = None,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        layers: int | None = None,
        splitting_ops: Sequence[str] = DEFAULT_SPLITTING_OPS,
        parameters: Mapping[str, Any] | None = None,
        example_inputs: Sequence[Any] | None = None,
        verify: bool = False,
        strict: bool = False,
    ) -> None:
        self.graph_module = graph_module
        self.verify = verify
        self.strict = strict
        self._device, self._dtype, self._layers = device, dtype, layers
        self._splitting_ops = frozenset(splitting_ops)
        self._parameters = dict(parameters or {})
        self._examples = example_inputs
        self._passes: list[Pass] = []
        self._params: dict[str, dict[str, Any]] = {}
        self._disabled: set[str] = set()
        self._warned: set[str] = set()

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes in the order in which they run, disabled ones among them."""
        return tuple(self._passes)

    def add(self, made_by: Pass | Callable[..., Pass], **params: Any) -> Pass:
        """Append a pass, or what a function or class makes with `params`; returns it.

        A parameter that is not given and that the manager's `parameters` have is taken from there.
        """
        added = made_by if isinstance(made_by, Pass) else self.make(made_by, **params)
        if isinstance(made_by, Pass) and params:
            raise PassError(added.name, f"is made already and takes no {', '.join(params)}")
        if any(known.name == added.name for known in self._passes):
            raise PassError(added.name, "is in the list already")
        self._passes.append(added)
        self._params[added.name] = params
        return added

    def disable(self, name: str) -> None:
        """Leave out the pass `name`, which may be added later; `canonicalise` can be left out too."""
        self._disabled.add(name)

    def key(self) -> str:
        """What of the passes determines their result, for the key of a cache."""
        active = [p for p in self._passes if p.name not in self._disabled]
        listed = [(p.name, p.version, sorted(self._params[p.name].items())) for p in active]
        return repr((listed, sorted(self._parameters.items())))

    def apply(self, graph_module: GraphModule | None = None, *, expectations: bool = True) -> Report:
        """Run the passes on the graph, in place.

        Args:
            graph_module: another graph than the constructor's.
            expectations: whether to check the number of matches; not for a part of a model.
        """
        module = graph_module if graph_module is not None else self.graph_module
        if module is None:
            raise ValueError("graph_module=None: give one to PassManager or to apply")
        self._check(module)
        context = self._context(module.graph)
        report = Report()
        for item in (CANONICALISE, *self._passes):
            entry = self._run(item, module, context)
            report.passes.append(entry)
            if expectations and entry.status in ("applied", "no match"):
                self._expect(item, entry, context)
        module.recompile()
        return report

    def make(self, factory: Callable[..., Pass], **params: Any) -> Pass:
        """Make a pass with `params`, and with those of the manager that it asks for."""
        name = getattr(factory, "__name__", str(factory))
        known = inspect.signature(factory).parameters
        given = {k: v for k, v in self._parameters.items() if k in known} | params
        try:
            inspect.signature(factory).bind(**given)
        except TypeError as error:
            raise PassError(name, f"{error}; it has {', '.join(known) or 'no parameters'}") from None
        made = factory(**given)
        if not isinstance(made, Pass):
            raise PassError(name, f"gave {type(made).__name__}, which is no Pass")
        return made

    def _check(self, module: GraphModule) -> None:
        for node in module.graph.nodes:
            fine = isinstance(node.target, OpOverload | HigherOrderOperator)
            module_of = getattr(node.target, "__module__", "")
            fine = fine or module_of in ("_operator", "math") or op_name(node.target).startswith("sym_")
            if node.op in ("call_method", "call_module") or (node.op == "call_function" and not fine):
                what = f"{node.op} {op_name(node.target)}"
                raise PassError("manager", f"{what} is no op; trace the model (torch.export, make_fx) first")
        if self._examples is not None:
            propagate(module, self._examples)
        missing = [n.name for n in module.graph.nodes if n.op == "placeholder" and "val" not in n.meta]
        if missing:
            raise PassError("manager", f"placeholder {missing[0]} has no fake value; give example_inputs")

    def _context(self, graph: Graph) -> PassContext:
        calls = [op_name(n.target) for n in graph.nodes if n.op == "call_function"]
        holes = sum(name in self._splitting_ops for name in calls)
        layers = holes if self._layers is None else self._layers
        dtype = self._dtype if self._dtype is not None else _common_dtype(graph)
        return PassContext(self._device, dtype, layers, self._splitting_ops, dict(self._parameters))

    def _run(self, item: Pass, module: GraphModule, context: PassContext) -> PassReport:
        entry = PassReport(item.name, "applied", bound=str(item.bound))
        entry.expected = None if item.expect is None else str(item.expect)
        if item.name in self._disabled:
            entry.status, entry.reason = "disabled", "disabled by name"
            return entry
        reason = item.skipped(context)
        if reason is not None:
            entry.status, entry.reason = "skipped", reason
            return entry
        before = copy_graph(module.graph)
        entry.ops_before = entry.ops_after = histogram(before)
        began = now()
        try:
            outcome = item.run(module.graph, context)
            remove_dead(module.graph)
            refresh(module.graph, before)
            _check_frame(item.name, before, module.graph)
        except (Exception, SystemExit) as error:
            self._undo(module, before, entry, "failed", _as_pass_error(item.name, error))
            return entry
        entry.ms = (now() - began) * 1e3
        entry.refused = dict(outcome.refused)
        if self.verify and not self._verify(item, module, before, entry):
            return entry
        entry.matches = outcome.matches
        entry.status = "applied" if outcome.matches else "no match"
        entry.ops_after = histogram(module.graph)
        entry.rewrites = outcome.rewrites or ([rewritten(before, module.graph)] if outcome.matches else [])
        return entry

    def _verify(self, item: Pass, module: GraphModule, before: Graph, entry: PassReport) -> bool:
        began = now()
        try:
            verdict = verify_rewrite(
                item.name, before, module.graph, item.bound, in_context=item.in_context, constants=module
            )
        except VerificationError as error:
            entry.error = error.error
            self._undo(module, before, entry, "refused", error)
            return False
        finally:
            entry.verify_ms = (now() - began) * 1e3
        entry.error = verdict.error
        return True

    def _undo(
        self, module: GraphModule, before: Graph, entry: PassReport, status: Any, error: PassError
    ) -> None:
        module.graph = before
        if self.strict:
            raise error
        entry.status, entry.reason = status, error.reason
        self._warn(entry.name, f"{error}; the graph is left as it was")

    def _expect(self, item: Pass, entry: PassReport, context: PassContext) -> None:
        found, wanted = entry.matches, item.expect
        if wanted is None or (wanted == EACH_LAYER and not context.layers):
            return
        if wanted == EACH_LAYER:
            met = found > 0 and found % context.layers == 0
            allowed = f"a multiple of {context.layers} layers"
        elif wanted == AT_LEAST_ONE:
            met, allowed = found > 0, "at least one"
        else:
            met, allowed = found == wanted, str(wanted)
        if met:
            return
        nearly = Counter(entry.refused).most_common(1)
        why = f"; {nearly[0][1]} times not: {nearly[0][0]}" if nearly else ""
        entry.missed = True
        error = PassError(item.name, f"{found} matches, expected {allowed}{why}")
        if self.strict:
            raise error
        self._warn(item.name, str(error))

    def _warn(self, name: str, message: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            log.warning(message)


def _check_frame(name: str, before: Graph, after: Graph) -> None:
    """Refuse a graph that is not sound, or whose inputs, outputs or order of writes changed."""
    after.lint()
    inputs = [[n.name for n in g.nodes if n.op == "placeholder"] for g in (before, after)]
    if inputs[0] != inputs[1]:
        raise PassError(name, f"inputs changed from {len(inputs[0])} to {len(inputs[1])} or in their order")
    results = [_output_values(g) for g in (before, after)]
    if len(results[0]) != len(results[1]):
        raise PassError(name, f"the graph had {len(results[0])} outputs and has {len(results[1])}")
    for index, (old, new) in enumerate(zip(*results, strict=True)):
        if not same_result(old, new):
            raise PassError(name, f"output {index} was {old} and is {new}")
    moved = write_order(before, after) or shared_memory(before, after)
    if moved is not None:
        raise PassError(name, moved)


def _output_values(graph: Graph) -> list[Any]:
    output = next(node for node in graph.nodes if node.op == "output")
    return [node.meta["val"] for node in inputs_of(output)]


def _as_pass_error(name: str, error: BaseException) -> PassError:
    if isinstance(error, PassError):
        return error
    wrapped = PassError(name, f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def _common_dtype(graph: Graph) -> torch.dtype | None:
    values = [n.meta.get("val") for n in graph.nodes if n.op == "placeholder"]
    dtypes = Counter(v.dtype for v in values if isinstance(v, Tensor) and v.dtype.is_floating_point)
    return dtypes.most_common(1)[0][0] if dtypes else None
