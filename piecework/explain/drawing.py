"""Draws a program: pieces in the colour of their kind, holes between them, and a card for each kind."""

from __future__ import annotations

from piecework.explain.elements import Html, chip, code, color, folded, text
from piecework.explain.report import Kind, ProgramReport, Step

_WIDEST, _NARROWEST = 76, 30


def draw_program(program: ProgramReport) -> Html:
    """The program in its order, and what the signs mean."""
    if program.opaque_reason is not None:
        reason = f"One eager hole: the model could not be traced. {program.opaque_reason}"
        return f"<p>{chip('not traced', 'bad')} {text(reason)}</p>"
    kinds = {kind.letter: (number, kind) for number, kind in enumerate(program.kinds)}
    drawn = []
    for index, step in enumerate(program.steps):
        wire = '<span class="wire"></span>' if index else ""
        shape = _piece(program, step, *kinds[step.kind]) if step.kind else _hole(step)
        drawn.append(f"<li>{wire}{shape}</li>")
    return f'<ol class="program">{"".join(drawn)}</ol>{_legend(program)}'


def _piece(program: ProgramReport, step: Step, number: int, kind: Kind) -> Html:
    ops = sum(kind.ops.values())
    others = len(kind.uses) - 1
    alike = f", like {others} other{'s' * (others != 1)}" if others else ""
    title = f"piece {step.piece}{alike}: {ops} ops"
    width = min(_WIDEST, _NARROWEST + 2 * ops)
    return (
        f'<a class="piece kind-{number}" href="#{program.name}-{kind.letter}" title="{text(title)}" '
        f'style="--c:{color(number)};width:{width}px">{text(kind.letter)}</a>'
    )


def _hole(step: Step) -> Html:
    where = "" if step.layer is None else f", layer {step.layer}"
    label = "&middot;" if step.layer is None else str(step.layer)
    return f'<span class="hole" title="{text(step.hole + where)}">{label}</span>'


def _legend(program: ProgramReport) -> Html:
    entries = [
        f'<span><i class="swatch" style="--c:{color(number)}">{text(kind.letter)}</i>'
        f"{len(kind.uses)} piece{'s' * (len(kind.uses) != 1)} of {sum(kind.ops.values())} ops</span>"
        for number, kind in enumerate(program.kinds)
    ]
    holes = sorted({step.hole for step in program.steps if step.hole})
    entries += [f'<span><i class="hole">n</i>hole: {text(op)} of layer n</span>' for op in holes]
    return f'<div class="legend">{"".join(entries)}</div>'


def highlight_rules(kinds: int) -> str:
    """CSS by which pointing at a piece lets the others fade that are of another kind."""
    return "".join(
        f".program:has(.kind-{n}:hover) .piece:not(.kind-{n}) {{ opacity: .25; }}\n" for n in range(kinds)
    )


def kind_cards(program: ProgramReport) -> Html:
    """Each distinct piece: what goes in and out, its ops, who compiled it, its graph and source."""
    return "".join(_card(program, number, kind) for number, kind in enumerate(program.kinds))


def _card(program: ProgramReport, number: int, kind: Kind) -> Html:
    where = "read from the disk cache" if kind.cached else "compiled"
    label = f"{program.name}, {len(kind.uses)} use{'s' * (len(kind.uses) != 1)}"
    chips = chip(kind.compiler) + chip(f"{where} in {kind.seconds * 1e3:.1f} ms")
    if kind.failure is not None:
        chips += chip(f"its compiler did not take it: {kind.failure}", "warn")
    ops = [f"{count} {name}" for name, count in sorted(kind.ops.items(), key=lambda item: -item[1])]
    lists = _list("in", kind.inputs) + _list("out", kind.outputs) + _list("ops", tuple(ops))
    source = folded("What it runs", code(kind.source.splitlines())) if kind.source else ""
    return (
        f'<article class="card kind" id="{program.name}-{kind.letter}" style="--c:{color(number)}">'
        f'<header><i class="swatch">{text(kind.letter)}</i><h3>{text(label)}</h3>{chips}'
        f'<span class="soft mono">{kind.key[:12]}</span></header>'
        f'<div class="lists">{lists}</div>{folded("Its graph", code(kind.lines))}{source}</article>'
    )


def _list(title: str, lines: tuple[str, ...]) -> Html:
    items = "".join(f"<li>{_line(*line.partition(': '))}</li>" for line in lines)
    return f'<div><h4>{title}</h4><ul class="mono">{items}</ul></div>'


def _line(name: str, _: str, shape: str) -> Html:
    return text(name) + (f' <span class="soft">{text(shape)}</span>' if shape else "")
