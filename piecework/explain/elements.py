"""Parts of an HTML page. Whatever comes from a model or a graph is escaped here, in one place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from html import escape
from re import findall

Html = str
_PALETTE = 8


def text(value: object) -> Html:
    """Plain text."""
    return escape(str(value))


def color(number: int) -> str:
    """The colour of distinct piece `number`, as a value of CSS: the palette's, then hues that differ."""
    return f"var(--k{number})" if number < _PALETTE else f"hsl({number * 137.5 % 360:.0f} 55% 50%)"


def table(head: Sequence[str], rows: Iterable[Sequence[Html]], numbers: Sequence[int] = ()) -> Html:
    """A table; `numbers` are the columns that stand to the right. Cells are HTML."""
    kinds = [' class="num"' if i in numbers else "" for i in range(len(head))]

    def line(tag: str, cells: Sequence[Html]) -> Html:
        made = (f"<{tag}{kind}>{cell}</{tag}>" for cell, kind in zip(cells, kinds, strict=True))
        return "<tr>" + "".join(made) + "</tr>"

    body = "".join(line("td", row) for row in rows)
    top = line("th", [text(name) for name in head])
    return f'<div class="wide"><table><thead>{top}</thead><tbody>{body}</tbody></table></div>'


def chip(value: object, kind: str = "") -> Html:
    """A short label; `kind` is good, warn, bad or nothing."""
    return f'<span class="chip {kind}">{text(value)}</span>'


def code(lines: Sequence[str], kind: str = "") -> Html:
    """Lines of code."""
    return f'<pre class="{kind}">{text(chr(10).join(lines))}</pre>'


def folded(summary: str, content: Html) -> Html:
    """Something that is shown on a click."""
    return f"<details><summary>{text(summary)}</summary>{content}</details>"


def card(content: Html) -> Html:
    """A framed part of the page."""
    return f'<div class="card">{content}</div>'


def sides(before: Sequence[str], after: Sequence[str]) -> Html:
    """Code before and after, side by side; what differs between lines that face each other is marked."""
    pairs = zip(before, after, strict=True) if len(before) == len(after) else ()
    marked = [_marked(old, new) for old, new in pairs]
    left = "\n".join(old for old, _ in marked) if marked else text("\n".join(before))
    right = "\n".join(new for _, new in marked) if marked else text("\n".join(after))
    nothing = '<span class="soft">nothing</span>'
    return (
        f'<div class="sides"><pre class="gone">{left or nothing}</pre>'
        f'<pre class="came">{right or nothing}</pre></div>'
    )


def _marked(old: str, new: str) -> tuple[Html, Html]:
    words = [findall(r"\w+|\W", line) for line in (old, new)]
    left: list[Html] = []
    right: list[Html] = []
    for tag, a, b, c, d in SequenceMatcher(None, words[0], words[1], autojunk=False).get_opcodes():
        for made, part in ((left, words[0][a:b]), (right, words[1][c:d])):
            piece = text("".join(part))
            made.append(piece if tag == "equal" or not piece else f"<mark>{piece}</mark>")
    return "".join(left), "".join(right)


def bars(counts: Mapping[str, tuple[int, int]]) -> Html:
    """Two bars a name, the second over the first, in the order of the largest count."""
    most = max((max(pair) for pair in counts.values()), default=1) or 1
    rows = []
    for name, (before, after) in sorted(counts.items(), key=lambda item: (-max(item[1]), item[0])):
        drawn = "".join(f'<i style="width:{100 * n / most:.1f}%"></i>' for n in (before, after))
        rows.append(
            [f"<code>{text(name)}</code>", f'<div class="bar">{drawn}</div>', str(before), str(after)]
        )
    return f'<div class="ops">{table(("op", "", "traced", "after passes"), rows, numbers=(2, 3))}</div>'
