"""Reads a program's report out of the program."""

from __future__ import annotations

from string import ascii_uppercase

from torch import fx

from piecework.explain.graphs import graph_lines, tensors
from piecework.explain.report import Kind, PassEntry, ProgramReport, Step
from piecework.explain.sources import source_of
from piecework.graph.passes.report import PassReport, histogram
from piecework.graph.program import HoleCall, PieceCall, Program


def letter(number: int) -> str:
    """Name distinct piece `number`: A, B, ..., Z, A2, B2, ..."""
    round_, index = divmod(number, len(ascii_uppercase))
    return ascii_uppercase[index] + (str(round_ + 1) if round_ else "")


def describe_program(name: str, program: Program) -> ProgramReport:
    """Describe a program under a name; one that could not be traced has neither ops nor kinds."""
    module = program.graph_module
    names = _placeholder_names(program)
    ops = histogram(module.graph) if module is not None else {}
    report = program.pass_report.passes if program.pass_report is not None else []
    traced = next((entry.ops_before for entry in report if entry.ops_before), ops)
    steps = _steps(program)
    return ProgramReport(
        name=name,
        graphs_traced=program.graphs_traced,
        pieces=program.num_pieces,
        holes=program.num_holes,
        distinct_pieces=program.num_distinct,
        opaque_reason=program.opaque_reason,
        seconds=_seconds(program),
        ops_traced=dict(traced),
        ops=ops,
        passes=tuple(map(_pass_entry, report)),
        steps=steps,
        kinds=tuple(_kind(program, number, steps, names) for number in range(program.num_distinct)),
        lines=tuple(graph_lines(module.graph, names)) if module is not None else (),
    )


def _seconds(program: Program) -> dict[str, float]:
    """The stages' times in their order; what verification took is a stage of its own."""
    found: dict[str, float] = {}
    entries = program.pass_report.passes if program.pass_report is not None else []
    verification = sum(entry.verify_ms for entry in entries) / 1e3
    for stage, seconds in program.seconds.items():
        found[stage] = seconds - verification if stage == "passes" else seconds
        if stage == "passes" and verification:
            found["verification"] = verification
    return found


def _placeholder_names(program: Program) -> dict[str, str]:
    if program.graph_module is None:
        return {}
    nodes = program.graph_module.graph.find_nodes(op="placeholder")
    return {node.name: binding.name for node, binding in zip(nodes, program.bindings, strict=True)}


def _pass_entry(entry: PassReport) -> PassEntry:
    return PassEntry(
        name=entry.name,
        status=entry.status,
        reason=entry.reason,
        matches=entry.matches,
        expected=entry.expected,
        refused=dict(entry.refused),
        ops_before=sum(entry.ops_before.values()),
        ops_after=sum(entry.ops_after.values()),
        ms=entry.ms,
        bound=entry.bound,
        error=entry.error,
        rewrites=tuple((rewrite.before, rewrite.after) for rewrite in entry.rewrites),
    )


def _steps(program: Program) -> tuple[Step, ...]:
    found: list[Step] = []
    pieces = 0
    for step in program.steps:
        if isinstance(step, PieceCall):
            found.append(Step(piece=pieces, kind=letter(step.distinct)))
            pieces += 1
        else:
            found.append(Step(hole=step.op, layer=_layer(step)))
    return tuple(found)


def _layer(hole: HoleCall) -> int | None:
    """The hole's argument `layer`, where its op has one."""
    schema = getattr(hole.function, "_schema", None)
    names = [a.name for a in schema.arguments] if schema is not None else []
    arguments = dict(zip(names, hole.args, strict=False)) | dict(hole.kwargs)
    layer = arguments.get("layer")
    return layer if isinstance(layer, int) else None


def _kind(program: Program, number: int, steps: tuple[Step, ...], names: dict[str, str]) -> Kind:
    graph, record = program.distinct_graphs[number].graph, program.records[number]
    name = letter(number)
    uses = tuple(s.piece for s in steps if s.kind == name and s.piece is not None)
    return Kind(
        letter=name,
        key=record.key,
        uses=uses,
        ops=histogram(graph),
        inputs=tuple(tensors(graph.find_nodes(op="placeholder"), names, everywhere=len(uses) > 1)),
        outputs=tuple(tensors(_results(graph), names)),
        compiler=record.compiler,
        seconds=record.seconds,
        cached=record.cached,
        failure=record.failure,
        lines=tuple(graph_lines(graph, names)),
        source=source_of(program.pieces[number]),
    )


def _results(graph: fx.Graph) -> list[fx.Node]:
    (output,) = graph.find_nodes(op="output")
    return list(output.all_input_nodes)
