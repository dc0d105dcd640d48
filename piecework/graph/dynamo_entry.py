"""`torch.compile(model, backend="piecework")`: any model in pieces, with the same passes as ours.

The holes of such a model are `scaled_dot_product_attention`, which torch has where we have our own op.
Everything is an input, weights too: dynamo hands them over with every call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from piecework.compilation import CompilationConfig
from piecework.devices.registry import make_device
from piecework.graph.binding import MAX_TOKENS, Binding
from piecework.graph.build import Options, assemble
from piecework.graph.counters import Counters
from piecework.graph.passes import FusionPlan, Report, make_manager
from piecework.graph.program import Program
from piecework.graph.split import SplitError
from piecework.graph.symbols import evaluate, expression, sources, symbolic_sizes
from piecework.graph.trace import Traced, TraceError
from piecework.profile import now

log = logging.getLogger("piecework.dynamo")

HOLES = ("piecework::attention", "aten::scaled_dot_product_attention")
"""Where a model is cut if nobody says otherwise."""

_sym_size = torch.ops.aten.sym_size.int

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)

Function = Callable[..., Any]


class Backend:
    """A backend for `torch.compile`, which keeps what it made.

        backend = Backend(CompilationConfig(compiler="inductor"))
        model = torch.compile(model, backend=backend)

    Attributes:
        config: `compiler`, `passes`, `disable_passes`, `verify_passes`, `compile_cache_dir` and `strict` are
            read from it; `splitting_ops` where they are not those of our own models.
        programs: one for each graph of dynamo's, in order; those that fell back to torch are not there.
        reports: what the passes did to each.
        counters: of all programs together.
    """

    def __init__(self, config: CompilationConfig | None = None) -> None:
        self.config = config or CompilationConfig()
        self.programs: list[Program] = []
        self.reports: list[Report] = []
        self.counters = Counters()

    def __call__(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Function:
        """Make the function that runs dynamo's graph; it takes and gives what the graph does.

        What can't be cut, and what is run with gradients, runs as torch would run it, with one warning that
        says why; in strict mode that is an error.

        Raises:
            TraceError, SplitError, CompileError, PassError: in strict mode only.
        """
        try:
            return self._build(graph_module, example_inputs)
        except (TraceError, SplitError) as error:
            if self.config.strict:
                raise
            log.warning("the graph runs as torch runs it: %s", error)
            return graph_module.forward

    def _build(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Function:
        trainable = any(isinstance(x, Tensor) and x.requires_grad for x in example_inputs)
        if torch.is_grad_enabled() and trainable:
            raise TraceError("pieces give no gradients; call the model under torch.no_grad()")
        traced, kept, results = _retrace(graph_module)
        holes = self.config.splitting_ops
        config = self.config.with_changes(splitting_ops=holes if holes != HOLES[:1] else HOLES)
        device = make_device(_device_kind(example_inputs))
        passes = _Recorder(
            make_manager(
                config.passes,
                config.disable_passes,
                foreign=True,
                fusions=FusionPlan.of(device.name, None),
                device=device.name,
                splitting_ops=config.splitting_ops,
                verify=config.verify_passes,
                strict=config.strict,
            )
        )
        program = assemble(traced, Options(device, config, passes, counters=self.counters))
        self.counters.add("traces")
        self.programs.append(program)
        self.reports.extend(passes.reports)
        log.info(
            "%d pieces (%d distinct), %d holes; passes: %s",
            program.num_pieces,
            program.num_distinct,
            program.num_holes,
            ", ".join(f"{name} {n}" for name, n in passes.reports[-1].matches.items() if n),
        )

        def run(*args: Any) -> Any:
            inputs = [args[i] for i in kept]
            return results.fill(program.run(inputs), inputs)

        return run


class _Recorder:
    """Passes that keep their reports."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.reports: list[Report] = []

    def apply(self, graph_module: fx.GraphModule) -> Report:
        report: Report = self._manager.apply(graph_module)
        self.reports.append(report)
        return report


@dataclass(frozen=True)
class _Results:
    """What dynamo's graph returns: `entries` has a program's result for None, else a size or a constant.

    `symbols` gives the input and the dimension that a symbol of a size is.
    """

    entries: tuple[Any, ...]
    symbols: Mapping[sympy.Symbol, tuple[int, int]]

    def fill(self, tensors: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Any, ...]:
        """Put tensors, sizes and constants in their order."""
        rest = iter(tensors)
        if all(entry is None for entry in self.entries):
            return tuple(rest)
        sizes = {symbol: inputs[i].shape[dim] for symbol, (i, dim) in self.symbols.items()}
        return tuple(next(rest) if entry is None else evaluate(entry, sizes) for entry in self.entries)


def _retrace(graph_module: fx.GraphModule) -> tuple[Traced, list[int], _Results]:
    """Turn dynamo's graph of Python calls into one of ops; also say which of its inputs that takes.

    Dynamo passes symbolic sizes as inputs of their own. In the new graph they come from the tensors.
    """
    start = now()
    inputs = graph_module.graph.find_nodes(op="placeholder")
    values = [node.meta.get("example_value", node.meta.get("val")) for node in inputs]
    mode = next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)
    if mode is None:
        raise TraceError("the graph has no tensor for an input")
    if any(isinstance(n.meta.get("example_value"), torch.SymFloat) for n in graph_module.graph.nodes):
        # dynamic=True makes inputs of an eps and a scale; then no op that wants a number can be found.
        raise TraceError(
            "its floating-point numbers are inputs; compile without dynamic=True (sizes become dynamic by "
            "themselves), or set torch._dynamo.config.specialize_float"
        )
    try:
        with mode, symbolic_sizes(), torch.no_grad():
            made = make_fx(graph_module, pre_dispatch=True)(*values)
    except Exception as error:
        raise TraceError(f"{type(error).__name__}: {error}") from error
    for node in made.graph.nodes:
        if any(isinstance(leaf, _SYMBOLS) for leaf in tree_leaves((node.args, node.kwargs))):
            raise TraceError(f"{node.name} takes a number that is known at run time only")
    places = list(made.graph.find_nodes(op="placeholder"))
    kept = [i for i, node in enumerate(places) if isinstance(node.meta["val"], Tensor)]
    _sizes_from_tensors(made.graph, places)
    tensors = [places[i] for i in kept]
    results = _take_sizes_out(made.graph, tensors)
    bindings = [Binding("input", str(node.target)) for node in tensors]
    return Traced(made, bindings, False, MAX_TOKENS, now() - start), kept, results


def _take_sizes_out(graph: fx.Graph, tensors: Sequence[fx.Node]) -> _Results:
    """Leave only tensors among the graph's results; the sizes are worked out from the inputs."""
    (output,) = graph.find_nodes(op="output")
    returned: Any = output.args[0]
    entries: list[Any] = []
    for value in returned:
        val = value.meta["val"] if isinstance(value, fx.Node) else value
        if not isinstance(val, Tensor | int | torch.SymInt):
            raise TraceError(f"it returns {type(val).__name__}, which is neither a tensor nor a size")
        entries.append(None if isinstance(val, Tensor) else expression(val))
    output.args = (tuple(v for v, entry in zip(returned, entries, strict=True) if entry is None),)
    found = {symbol: (tensors.index(node), dim) for symbol, (node, dim) in sources(tensors).items()}
    needed = {s for entry in entries if entry is not None for s in entry.free_symbols}
    if needed - found.keys():
        raise TraceError(f"it returns the size {min(needed - found.keys(), key=str)}, which no input has")
    return _Results(tuple(entries), found)


def _sizes_from_tensors(graph: fx.Graph, places: Sequence[fx.Node]) -> None:
    """Replace the inputs that are no tensors by sizes of those that are."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    known = sources(places)
    for node in places:
        value = node.meta["val"]
        if isinstance(value, Tensor):
            continue
        if node.users:
            source = known.get(expression(value)) if isinstance(value, torch.SymInt) else None
            if source is None:
                raise TraceError(f"the input {node.name} = {value} is no tensor, and no tensor has that size")
            with graph.inserting_before(first):
                size = graph.call_function(_sym_size, source)
            size.meta["val"] = value
            node.replace_all_uses_with(size)
        graph.erase_node(node)


def _device_kind(example_inputs: Sequence[Any]) -> str:
    kinds = {x.device.type for x in example_inputs if isinstance(x, Tensor)}
    if len(kinds) > 1:
        raise TraceError(f"the inputs are on several kinds of devices: {', '.join(sorted(kinds))}")
    return kinds.pop() if kinds else "cpu"


def piecework(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Function:
    """The backend that `torch.compile` knows by name; `options` are settings of a CompilationConfig."""
    return Backend(CompilationConfig.parse(dict(options or {})))(graph_module, example_inputs)
