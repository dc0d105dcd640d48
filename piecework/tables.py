"""Tables of plain text."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[object]], indent: str = "") -> str:
    """Lay rows out below a head; columns of numbers stand to the right. None is an empty cell."""
    texts = [["" if cell is None else str(cell) for cell in row] for row in rows]
    right = [all(_is_number(row[i]) for row in rows) for i in range(len(head))]
    widths = [max(len(line[i]) for line in [list(head), *texts]) for i in range(len(head))]
    lines = []
    for line in [list(head), *texts]:
        cells = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ]
        lines.append(indent + "  ".join(cells).rstrip())
    return "\n".join(lines)


def _is_number(cell: object) -> bool:
    if isinstance(cell, str):
        return cell[:1].isdigit() or cell in ("", "-")
    return cell is None or isinstance(cell, int | float)


def runs(items: Sequence[str]) -> list[tuple[str, int]]:
    """Count equal neighbours: a, b, b, a gives (a, 1), (b, 2), (a, 1)."""
    found: list[tuple[str, int]] = []
    for item in items:
        if found and found[-1][0] == item:
            found[-1] = (item, found[-1][1] + 1)
        else:
            found.append((item, 1))
    return found
