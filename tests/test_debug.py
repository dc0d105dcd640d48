"""How deep to look, and where the records go."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from piecework import debug
from piecework.errors import ConfigError


@pytest.mark.parametrize(("value", "depth"), [(None, 0), ("", 0), ("0", 0), ("1", 1), ("5", 5)])
def test_the_depth_is_a_number(monkeypatch: pytest.MonkeyPatch, value: str | None, depth: int) -> None:
    monkeypatch.delenv(debug.VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(debug.VARIABLE, value)
    assert debug.level() == depth


@pytest.mark.parametrize("value", ["6", "-1", "yes", "1.5"])
def test_another_depth_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(debug.VARIABLE, value)
    with pytest.raises(ConfigError, match=r"PIECEWORK_DEBUG='.*' is not allowed: a number from 0 to 5"):
        debug.level()


def test_records_go_where_the_packages_go(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, logger="piecework"):
        caplog.handler.setLevel(logging.NOTSET)
        debug.say(3, "a graph")  # whatever the package's own level is
    assert [(r.name, r.getMessage()) for r in caplog.records] == [("piecework.debug", "[3] a graph")]


def test_a_program_that_set_up_no_logging_sees_them_on_stderr_once() -> None:
    code = "from piecework import debug\ndebug.say(1, 'a plan')\ndebug.say(2, 'a pass')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "[1] a plan\n[2] a pass\n")
