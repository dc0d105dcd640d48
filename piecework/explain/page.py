"""The report as one HTML page: no script, no network, nothing beside the file."""

from __future__ import annotations

from piecework.explain.drawing import draw_program, highlight_rules, kind_cards
from piecework.explain.elements import Html, bars, card, chip, code, folded, table, text
from piecework.explain.report import CaptureReport, Choice, ProgramReport, Report
from piecework.explain.rewrites import pass_cards
from piecework.explain.style import STYLE
from piecework.explain.text import headline
from piecework.units import format_size
from piecework.version import __version__

_SECTIONS = ("program", "pieces", "passes", "ops", "captures", "available", "graph")


def report_page(report: Report) -> str:
    """Return the page's text."""
    title = f"{report.model} on {report.device}"
    links = "".join(f'<a href="#{name}">{name.capitalize()}</a>' for name in _SECTIONS)
    parts = [
        f"<h1>{text(title)}</h1><p class='soft'>{text(headline(report))}</p><nav>{links}</nav>",
        _tiles(report),
        _section("program", "Program", _programs(report)),
        _section("pieces", "Distinct pieces", "".join(kind_cards(p) for p in report.programs)),
        _section("passes", "Passes, and what they rewrote", "".join(pass_cards(p) for p in report.programs)),
        _section("ops", "Ops", "".join(_ops(p) for p in report.programs)),
        _section("captures", "Captures", _captures(report)),
        _section("available", "What there is to choose from", _available(report)),
        _section("graph", "The graph after passes", "".join(_graph(p) for p in report.programs)),
    ]
    style = STYLE + highlight_rules(max(len(p.kinds) for p in report.programs))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)} - piecework explain</title><style>{style}</style></head>"
        f"<body><main>{''.join(parts)}<p class='soft'>piecework {__version__}</p></main></body></html>\n"
    )


def _section(name: str, title: str, content: Html) -> Html:
    return f'<section id="{name}"><h2>{text(title)}</h2>{content}</section>'


def _tiles(report: Report) -> Html:
    body = report.body
    compiled = sum(p.seconds.get("compile", 0.0) for p in report.programs)
    tiles = [
        (body.pieces, "pieces"),
        (body.holes, "holes"),
        (body.distinct_pieces, "distinct pieces"),
        (_seconds(body.seconds.get("trace")), "trace"),
        (_seconds(body.seconds.get("passes")), "passes"),
        (_seconds(compiled), f"compile ({report.compiler})"),
        (report.capture.graphs, "graphs to capture"),
    ]
    made = (f'<div class="tile"><b>{text(value)}</b><span>{text(what)}</span></div>' for value, what in tiles)
    return f'<div class="tiles">{"".join(made)}</div>'


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.1f} s"


def _programs(report: Report) -> Html:
    return "".join(card(f"<h3>{text(p.name)}</h3>{draw_program(p)}{_stages(p)}") for p in report.programs)


def _stages(program: ProgramReport) -> Html:
    """How the time to make the program divides."""
    if not program.seconds:
        return ""
    whole = sum(program.seconds.values()) or 1.0
    drawn, named = "", ""
    for number, (stage, seconds) in enumerate(program.seconds.items()):
        c = f"color-mix(in srgb, var(--accent) {100 * 0.76**number:.0f}%, var(--card))"
        drawn += f'<i style="--c:{c};width:{100 * seconds / whole:.2f}%"></i>'
        named += f'<span><i class="swatch" style="--c:{c}"></i>{stage} {_seconds(seconds)}</span>'
    return f'<div class="stages" style="margin-top:18px">{drawn}</div><div class="legend">{named}</div>'


def _ops(program: ProgramReport) -> Html:
    names = {*program.ops_traced, *program.ops}
    if not names:
        return ""
    counts = {name: (program.ops_traced.get(name, 0), program.ops.get(name, 0)) for name in names}
    return card(f"<h3>{text(program.name)}</h3>{bars(counts)}")


def _captures(report: Report) -> Html:
    capture = report.capture
    rows = [
        ["decode", f"<b>{text(capture.decode)}</b>", text(", ".join(capture.decode_modes))],
        ["prefill", f"<b>{text(capture.prefill)}</b>", text(", ".join(capture.prefill_modes))],
    ]
    parts = [table(("phase", "graph mode", "the device has"), rows), _plan(capture)]
    parts.append(f"<p>Steps outside graphs {text(capture.eager_steps)}.</p>")
    found = report.break_even
    if found.measured:
        measured = [[str(n), f"{eager:.3f}", f"{graph:.3f}"] for n, eager, graph in found.measured]
        parts.append(table(("tokens", "eager ms", "captured ms"), measured, numbers=(0, 1, 2)))
    parts.append(f"<p class='soft'>Break-even: {text(found.note)}.</p>")
    return card("".join(parts))


def _plan(capture: CaptureReport) -> Html:
    if not capture.graphs and not capture.dropped:
        return "<p>Nothing is captured.</p>"
    said = f"{capture.graphs} graphs"
    if capture.graph_budget is not None:
        said += f"; the device has room for {capture.graph_budget}"
    if capture.bytes is not None:
        shared, each = format_size(capture.pool_bytes or 0), format_size(capture.graph_bytes or 0)
        said += f"; {format_size(capture.bytes)}: {shared} shared, {each} for each graph"
    rows = [[text(name), _sizes(sizes), chip("captured", "good")] for name, sizes in capture.sizes.items()]
    rows += [[text(name), _sizes(sizes), chip(why, "warn")] for name, sizes, why in capture.dropped]
    return f"<p>{text(said)}.</p>" + table(("program", "sizes", ""), rows)


def _sizes(sizes: tuple[int, ...]) -> Html:
    return '<div class="sizes">' + "".join(f"<span>{size}</span>" for size in sizes) + "</div>"


def _available(report: Report) -> Html:
    def listed(title: str, choices: tuple[Choice, ...]) -> Html:
        rows = [[f"<code>{text(c.name)}</code>", text(c.origin), text(c.note)] for c in choices]
        return card(f"<h3>{text(title)}</h3>{table(('name', 'from', ''), rows)}")

    return (
        listed("Devices", report.devices)
        + listed("Compilers", report.compilers)
        + listed("Passes", report.passes)
    )


def _graph(program: ProgramReport) -> Html:
    if not program.lines:
        return ""
    return card(folded(f"{program.name}, {len(program.lines)} lines", code(program.lines)))
