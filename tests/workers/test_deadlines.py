"""How long a step may be silent before its process counts as hung."""

from __future__ import annotations

import pytest

from piecework.config import EngineConfig
from piecework.errors import ConfigError
from piecework.workers.serving.deadlines import Deadlines


def test_a_limit_is_twenty_medians_and_at_least_ten_seconds():
    limits = Deadlines(None, first=300.0)
    assert limits.seconds(1) == 300.0  # nothing is known yet
    for seconds in (0.02, 0.03, 40.0):  # one slow step does not move a median
        limits.took(1, seconds)
    assert limits.seconds(1) == 10.0
    for _ in range(3):
        limits.took(512, 2.0)
    assert limits.seconds(512) == 40.0
    assert limits.seconds(2048) == 160.0  # twice the rows, twice: not seen, so taken from the nearest below
    assert limits.seconds(1) == 10.0  # prefill does not let a decode step hang for longer


def test_a_size_below_all_that_ran_gets_their_limit():
    limits = Deadlines(None, first=300.0)
    limits.took(64, 1.0)
    assert limits.seconds(1) == 20.0


def test_a_given_limit_holds_for_every_step():
    limits = Deadlines(5.0, first=300.0)
    limits.took(1, 100.0)
    assert limits.seconds(1) == limits.seconds(2048) == 5.0


def test_the_flags_are_checked():
    config = EngineConfig.from_flat({})
    worker = config.worker
    assert (worker.start_timeout, worker.compile_timeout, worker.step_timeout) == (300.0, 600.0, None)
    for name in ("start_timeout", "compile_timeout", "step_timeout"):
        with pytest.raises(ConfigError, match=f"{name}="):
            EngineConfig.from_flat({name: 0.0})
        with pytest.raises(ConfigError, match=f"{name}="):
            EngineConfig.from_flat({name: float("inf")})
