"""Each pass as a card, with the graph before and after every rewrite; those alike stand behind the first."""

from __future__ import annotations

import re

from piecework.explain.elements import Html, card, chip, folded, sides, table, text
from piecework.explain.report import PassEntry, ProgramReport

_NUMBER = re.compile(r"_\d+\b")
_STATUS = {"applied": "good", "refused": "bad", "failed": "bad", "skipped": "warn", "disabled": "warn"}
_HEAD = ("pass", "", "matches", "ops", "ms", "declared", "verified error")

Rewrite = tuple[tuple[str, ...], tuple[str, ...]]


def pass_cards(program: ProgramReport) -> Html:
    """All passes of a program in a table, then the rewrites of each."""
    if not program.passes:
        return ""
    rows = table(_HEAD, [_row(entry) for entry in program.passes], numbers=(2, 3, 4))
    rewritten = "".join(_rewrites(entry) for entry in program.passes if entry.rewrites)
    return card(f"<h3>{text(program.name)}</h3>{rows}") + rewritten


def _row(entry: PassEntry) -> list[Html]:
    notes = [entry.reason] if entry.reason else []
    notes += [f"{count} times not: {reason}" for reason, count in entry.refused.items()]
    said = "".join(f'<div class="soft">{text(note)}</div>' for note in notes)
    name = f"<code>{text(entry.name)}</code>{said}"
    status = chip(entry.status, _STATUS.get(entry.status, ""))
    if not entry.ops_before:
        return [name, status, "", "", "", text(entry.bound), ""]
    ops = f"{entry.ops_before} &rarr; {entry.ops_after}"
    return [name, status, str(entry.matches), ops, f"{entry.ms:.1f}", text(entry.bound), _error(entry)]


def _error(entry: PassEntry) -> Html:
    if entry.error is None:
        return chip("not verified", "warn")
    kind = "bad" if entry.status == "refused" else "good" if entry.matches else ""
    return chip(f"{entry.error:.2g}", kind)


def _rewrites(entry: PassEntry) -> Html:
    groups = "".join(_group(alike) for alike in group_alike(entry.rewrites))
    return card(f"<h3><code>{text(entry.name)}</code></h3>{groups}")


def group_alike(rewrites: tuple[Rewrite, ...]) -> list[list[Rewrite]]:
    """Put rewrites together that differ in the numbers of names only."""
    groups: dict[tuple[tuple[str, ...], ...], list[Rewrite]] = {}
    for rewrite in rewrites:
        key = tuple(tuple(_NUMBER.sub("", line) for line in side) for side in rewrite)
        groups.setdefault(key, []).append(rewrite)
    return list(groups.values())


def _group(alike: list[Rewrite]) -> Html:
    first, *others = alike
    shown = f'<div class="rewrite">{sides(*first)}</div>'
    if not others:
        return shown
    rest = "".join(f'<div class="rewrite">{sides(*rewrite)}</div>' for rewrite in others)
    return shown + folded(f"{len(others)} more like it", rest)
