"""`bench failover`: every request of a batch meets the fault, and goes on with the right tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from tiny import save_tiny

from piecework.bench.failover import failover_table, run_failover, within_goal
from piecework.bench.options import FailoverOptions
from piecework.errors import ConfigError
from piecework.runner import failover

SETTINGS = {"dtype": "float32", "threads": 1, "num_pages": 40, "prefix_caching": False}
SIZES = {"decode_capture_sizes": [2], "prefill_capture_sizes": [16]}


def test_a_batch_that_loses_its_device_is_timed_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = failover.load

    def slowly(config: Any, profile: Any, device: Any, *rest: Any, **options: Any) -> Any:
        sleep(0.5 if device.name == "cpu" else 0.0)
        return load(config, profile, device, *rest, **options)

    monkeypatch.setattr(failover, "load", slowly)
    settings = {
        "model": str(save_tiny(tmp_path, "llama")),
        "compilation_config": {"compiler": "eager", **SIZES, "compile_cache_dir": str(tmp_path / "cache")},
        **SETTINGS,
    }
    options = FailoverOptions(batch_sizes="2", input_len=8, output_len=8, fail_at=4, repeats=1)
    lost = replace(options, standbys="warm", kind="lost")
    (again,) = run_failover(settings, lost)["cases"]
    assert (again["copied_tokens"], again["outputs_equal"]) == (0, 2)
    assert again["computed_tokens"] == again["tokens"] - 2
    report = run_failover(settings, options)
    assert [case["standby"] for case in report["cases"]] == ["cold", "warm"]
    for case in report["cases"]:
        assert case["copied_tokens"] == case["tokens"] - 2  # all but the last one of each
        assert case["computed_tokens"] == 0 and 0 < case["copy_ms"] < case["gap_ms"]
        assert (case["from"], case["to"], case["outputs_equal"], case["outputs_compared"]) == (
            "sim",
            "cpu",
            2,
            2,
        )
        assert case["tokens"] == 2 * 8 + 2 * 5  # prompts, and what came before the fault
        assert case["gap_ms"] > case["detection_ms"] >= 0 and case["gap_ms"] > case["ready_ms"]
    cold, warm = report["cases"]
    assert warm["ready_ms"] < 500 <= cold["ready_ms"]  # a load against none
    assert "2 of 2" in failover_table(report)


def test_the_goal_is_a_prefill_and_two_steps_without_the_detection() -> None:
    case = {"gap_ms": 100.0, "detection_ms": 30.0, "prefill_ms": 50.0, "step_ms": 10.0}
    assert within_goal(case) and not within_goal({**case, "detection_ms": 29.0})


def test_what_can_not_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="output_len"):
        FailoverOptions(output_len=9, fail_at=8)
    with pytest.raises(ConfigError, match="standbys='hot'"):
        FailoverOptions(standbys="cold,hot")
    with pytest.raises(ConfigError, match="kind='hang'"):
        run_failover({}, FailoverOptions(kind="hang"))
    with pytest.raises(ConfigError, match="inject_fault"):
        run_failover({"inject_fault": "point=run"}, FailoverOptions())
