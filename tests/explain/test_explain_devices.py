"""The report names the pieces that run elsewhere: one that failed at home, and one that was put there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from piecework.errors import ConfigError
from piecework.explain.report import Report
from piecework.explain.text import report_text


def test_a_moved_piece_is_named_with_its_reason(explained: Callable[..., Report]) -> None:
    settings = {"device": "sim,cpu", "inject_fault": "point=compile,piece=1", "max_model_len": 64}
    report = explained("llama", settings)
    kinds = {kind.letter: kind for kind in report.body.kinds}
    assert kinds["B"].failure == "sim failed at compile: planned fault at compile 1"
    assert kinds["B"].compiler.endswith(" on cpu")
    assert {kinds[letter].failure for letter in "AC"} == {None}
    assert "  B: sim failed at compile: planned fault at compile 1" in report_text(report).splitlines()
    assert report.capture.graphs == 0  # with a piece elsewhere nothing is captured


def test_a_placed_piece_is_named(explained: Callable[..., Report]) -> None:
    report = explained("llama", {"device": "cpu", "place": "last:sim,head:sim"})
    assert [kind.compiler for kind in report.body.kinds][-1] == "eager on sim (placed)"
    assert not any("placed" in kind.compiler for kind in report.body.kinds[:-1])
    assert "eager on sim (placed)" in report_text(report)
    assert "placed" in report.programs[1].kinds[0].compiler


def test_a_piece_that_is_not_there_is_refused(explained: Callable[..., Report]) -> None:
    with pytest.raises(ConfigError, match="place='9:cpu' is not allowed: a piece below 3, or last"):
        explained("llama", {"device": "cpu", "place": "9:cpu"})
