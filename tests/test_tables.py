"""Tables of plain text."""

from __future__ import annotations

from piecework.tables import runs, table


def test_numbers_stand_to_the_right_and_text_to_the_left() -> None:
    rows = [("a", 5, "1.50", "x"), ("long name", 12, "-", None), ("b", None, "10.25", "yz")]
    assert table(("name", "n", "ms", "note"), rows).splitlines() == [
        "name        n     ms  note",
        "a           5   1.50  x",
        "long name  12      -",
        "b              10.25  yz",
    ]


def test_an_indent_goes_before_every_line() -> None:
    assert table(("a",), [("b",)], indent="  ") == "  a\n  b"


def test_runs_of_equal_neighbours() -> None:
    assert runs(["A", "B", "B", "A"]) == [("A", 1), ("B", 2), ("A", 1)]
    assert runs([]) == []
