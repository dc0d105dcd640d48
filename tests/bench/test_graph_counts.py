"""The counters that a profile of `bench latency` shows."""

from __future__ import annotations

from piecework.bench.latency import graph_counts
from piecework.bench.report import profile_table


def test_what_ran_is_a_difference_and_what_was_built_is_not() -> None:
    before = {"body": {"pieces": 4, "captures": 9, "replays": 10, "eager_runs": 2}}
    after = {"body": {"pieces": 4, "captures": 9, "replays": 13, "eager_runs": 2}}
    found = graph_counts(before, after)
    assert found == {"body.pieces": 4, "body.captures": 9, "body.replays": 3, "body.eager_runs": 0}


def test_long_names_keep_the_columns_apart() -> None:
    name = "body.pass_matches." + "x" * 40
    lines = profile_table({"timers": {}, "bytes": {}, "counters": {name: 12, "body.pieces": 3}}).splitlines()
    assert lines[1].endswith(f"{name}       12")
    assert len(lines[1]) == len(lines[2])
