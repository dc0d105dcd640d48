"""What `PIECEWORK_DEBUG` shows of programs that are about to run."""

from __future__ import annotations

from piecework.debug import say
from piecework.explain.explain import describe_captures
from piecework.explain.programs import describe_program
from piecework.explain.text import captures_text, kinds_text, passes_text, program_text
from piecework.graph.counters import Counters
from piecework.runner.programs import Programs


def show_layers(programs: Programs, depth: int) -> None:
    """Say what there is to know down to layer `depth`, see piecework.debug; steps tell of themselves."""
    reports = [describe_program("body", programs.body), describe_program("head", programs.head)]
    counted = {"body": programs.counters, "head": programs.head_counters}
    for report in reports:
        say(1, program_text(report))
        say(1, counters_text(report.name, counted[report.name]))
    say(1, captures_text(describe_captures(programs)))
    for report in reports:
        if depth >= 2 and report.kinds:
            say(2, passes_text(report))
            say(2, kinds_text(report))
        if depth >= 3 and report.lines:
            say(3, "\n  ".join([f"The graph of the {report.name} after passes", *report.lines]))
        if depth >= 4:
            for kind in report.kinds:
                title = f"Piece {kind.letter} of the {report.name}, by {kind.compiler} (key {kind.key[:12]})"
                say(4, f"{title}\n{kind.source or 'its compiler leaves no source'}")


def counters_text(name: str, counters: Counters) -> str:
    """The counters of one program that are not zero, in one line."""
    counted = ", ".join(f"{key} {n}" for key, n in counters.snapshot().items() if n)
    return f"Counters of the {name}: {counted or 'all zero'}"
