"""From a model to a program: trace, passes, split, fold, compile, link."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, fx, nn

from piecework.compile.base import CompileContext, Compiler
from piecework.compile.pieces import compile_pieces
from piecework.compile.registry import make_compiler
from piecework.devices.base import Device
from piecework.graph.binding import MAX_TOKENS, Binding
from piecework.graph.counters import Counters
from piecework.graph.fold import fold
from piecework.graph.link import link
from piecework.graph.program import Program
from piecework.graph.split import SplitError, SplitGraph, split
from piecework.graph.symbols import HINT
from piecework.graph.trace import Traced, TraceError, trace
from piecework.profile import Profile, now

if TYPE_CHECKING:
    from piecework.compilation import CompilationConfig
    from piecework.graph.passes.report import Report
    from piecework.models.decoder import CausalLM

log = logging.getLogger("piecework.graph")


class Passes(Protocol):
    """Rewrites a flat graph in place; a piecework.graph.passes.PassManager."""

    def apply(self, graph_module: fx.GraphModule) -> Report:
        """Run all passes and say what they did."""


@dataclass
class Options:
    """What programs are built with.

    Attributes:
        config: splitting ops, compiler and strictness are read from it.
        compiler: another one than the config's.
        cache_dir: where compiled pieces are kept; by default what the config says, else they aren't.
        max_tokens: the most tokens that a run may have.
    """

    device: Device
    config: CompilationConfig
    passes: Passes | None = None
    compiler: Compiler | None = None
    counters: Counters = field(default_factory=Counters)
    profile: Profile = field(default_factory=Profile)
    cache_dir: Path | None = None
    max_tokens: int = MAX_TOKENS


def build_program(model: CausalLM, options: Options) -> Program:
    """Make the program of a model's body.

    Its inputs are `input_ids` and `positions` [T] int64 and, where the model has experts,
    `num_valid_rows` [1] int64; its result is the hidden states after the final norm, [T, H].

    Raises:
        TraceError, SplitError, CompileError: in strict mode. Otherwise the model runs as one eager hole,
            or a piece uncompiled, with a warning that says why.
    """
    names, sizes = ["input_ids", "positions"], [HINT, HINT]
    if model.config.num_experts:
        names.append("num_valid_rows")
        sizes.append(1)
    where = options.device.torch_device
    return build(model, names, [torch.empty(n, dtype=torch.int64, device=where) for n in sizes], options)


def build_head_program(model: CausalLM, options: Options) -> Program:
    """Make the program of a model's head: `rows` [R, H] in, logits [R, V] out. See build_program.

    Give it counters of its own: those of the body are about the body.
    """
    dtype = model.dtype
    rows = torch.empty(HINT, model.config.hidden_size, dtype=dtype, device=options.device.torch_device)
    return build(model.head, ["rows"], [rows], options)


def build(
    fn: Callable[..., Any], names: Sequence[str], examples: Sequence[Tensor], options: Options
) -> Program:
    """Make the program of a module or a module's method, from inputs of the right shapes and dtypes.

    The first dimension of every input that is as long as the first input is the number of tokens.
    """
    try:
        traced = trace(fn, examples, names=names, max_tokens=options.max_tokens)
        options.counters.add("traces")
        options.profile.add_time("trace", traced.seconds)
        return assemble(traced, options)
    except (TraceError, SplitError) as error:
        if options.config.strict:
            raise
        reason = error.reason if isinstance(error, TraceError) else str(error)
        log.warning("the model runs eagerly, as one hole: %s", reason)
        options.counters.add("holes")
        return Program.opaque(fn, options.device, reason)


def assemble(traced: Traced, options: Options) -> Program:
    """Make the program of a traced graph.

    Raises:
        SplitError: a splitting op can't be one.
        CompileError: in strict mode, a compiler failed.
    """
    seconds = {"trace": traced.seconds}
    counters, device = options.counters, options.device
    module = traced.graph_module
    known = dict(zip((n.name for n in _placeholders(module)), traced.bindings, strict=True))
    start = now()
    report = None
    if options.passes is not None:
        report = options.passes.apply(module)
        for entry in report.passes:
            counters.add_matches(entry.name, entry.matches)
    # Constants and weights that passes made are wherever they were made; graphs read the device's memory.
    bindings = [
        b if b.tensor is None else replace(b, tensor=device.place(b.tensor)) for b in _rebind(module, known)
    ]
    seconds["passes"] = now() - start
    start = now()
    graph = split(module.graph, options.config.cuts)
    folded = fold([piece.graph_module for piece in graph.pieces])
    seconds["split"] = now() - start
    start = now()
    compiler = options.compiler or make_compiler(_compiler_name(options))
    context = CompileContext(
        device,
        cache_dir=_cache_dir(options),
        strict=options.config.strict,
        max_tokens=traced.max_tokens,
        counters=counters,
        automatic=options.config.compiler == "auto",
    )
    calls = _weights_of_calls(graph, folded.kind, bindings)
    pieces, records = compile_pieces(folded.distinct, folded.keys, compiler, context, calls=calls)
    seconds["compile"] = now() - start
    for stage in ("passes", "split", "compile"):
        options.profile.add_time(stage, seconds[stage])
    program = link(
        graph,
        folded.kind,
        pieces,
        bindings,
        device,
        single=traced.single,
        max_tokens=traced.max_tokens,
    )
    program.graph_module, program.distinct_graphs = module, tuple(folded.distinct)
    program.seconds, program.pass_report, program.records = seconds, report, tuple(records)
    counters.add("pieces", program.num_pieces)
    counters.add("holes", program.num_holes)
    counters.add("distinct", program.num_distinct)
    return program


def _weights_of_calls(
    graph: SplitGraph, kinds: Sequence[int], bindings: Sequence[Binding]
) -> list[list[tuple[Tensor | None, ...]]]:
    """For each distinct piece the weights of its calls, by the piece's inputs."""
    bound = {node: b.tensor for node, b in zip(graph.placeholders, bindings, strict=True)}
    calls: list[list[tuple[Tensor | None, ...]]] = [[] for _ in range(max(kinds, default=-1) + 1)]
    for piece, kind in zip(graph.pieces, kinds, strict=True):
        calls[kind].append(tuple(bound.get(node) for node in piece.inputs))
    return calls


def _compiler_name(options: Options) -> str:
    name = options.config.compiler
    return options.device.default_compiler() if name == "auto" else name


def _cache_dir(options: Options) -> Path | None:
    if options.cache_dir is not None:
        return options.cache_dir
    folder = options.config.compile_cache_dir
    return Path(folder).expanduser() if folder else None


def _placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return list(module.graph.find_nodes(op="placeholder"))


def _rebind(module: fx.GraphModule, known: dict[str, Binding]) -> list[Binding]:
    """Say what each placeholder stands for after passes: some weights may be gone, others new.

    A pass that makes a new weight leaves it as an attribute of the module; it becomes an input.
    """
    graph = module.graph
    for node in graph.find_nodes(op="get_attr"):
        value = _attribute(module, str(node.target))
        with graph.inserting_before(next(iter(graph.nodes))):
            made = graph.placeholder(f"made_{node.name}")
        made.meta = dict(node.meta)
        known[made.name] = Binding("weight", str(node.target), value)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
    for node in _placeholders(module):
        if known[node.name].kind == "weight" and not node.users:
            graph.erase_node(node)
    module.recompile()
    return [known[node.name] for node in _placeholders(module)]


def _attribute(module: nn.Module, path: str) -> Tensor:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    if not isinstance(value, Tensor):
        raise SplitError(f"the graph uses the attribute {path}, which is no tensor")
    return value
