"""The comparison with other engines: its ratios, its tables, what engines say over their pipes."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny import save_tiny

from benchmarks.peers import report, serving, table
from benchmarks.peers.check import agreement
from benchmarks.peers.contenders import ENVIRONMENT, PRECISIONS, Case, Contender
from benchmarks.peers.machine import commit, describe, file_name, sentence
from benchmarks.peers.others import Machine
from benchmarks.peers.process import EngineError, EngineProcess
from benchmarks.peers.protocol import Times, Tokens, answer
from benchmarks.peers.speed import reference, run_precision


def engine(name: str, ours: bool, *speeds: float, error: str | None = None) -> dict[str, Any]:
    return {
        "name": name,
        "ours": ours,
        "version": "1",
        "tokens_as_reference": "128/128",
        "weight_bytes": 100,
        "speeds": list(speeds),
        "floors": [1000.0] * len(speeds),
        "others": [0.02] * len(speeds),
        "error": error,
    }


def row(case: str, *engines: dict[str, Any]) -> dict[str, Any]:
    return {"precision": "int8", "case": case, "commit": "abc", "engines": list(engines)}


DECODE = row(
    "decode",
    engine("Piecework a", True, 6.0, 8.0, 4.0),
    engine("Piecework b", True, 2.0, 2.0, 2.0),
    engine("slow 1", False, 2.0, 1.0, 1.0),
    engine("fast | 2", False, 2.0, 8.0, 4.0),
    engine("broken 3", False, error="it ended: no memory"),
)


def test_ratios_are_medians_of_rounds_not_ratios_of_medians() -> None:
    assert table.ratio([6.0, 8.0, 4.0], [2.0, 8.0, 4.0]) == 1.0
    assert table.ratio([3.0, 8.0, 2.0], [1.0, 8.0, 4.0]) == 1.0
    with pytest.raises(ValueError):
        table.ratio([1.0, 1.0], [1.0])


def test_share_of_the_floor_is_bytes_a_second_over_what_memory_allowed_in_that_round() -> None:
    found = {**engine("x", True, 2.0, 5.0, 8.0), "floors": [1000.0, 2000.0, 800.0]}
    assert table.floor_share(found) == pytest.approx(0.25)  # of 0.2, 0.25 and 1.0


def test_the_best_peer_is_one_of_the_others_and_one_that_ran() -> None:
    assert table.best_peer(DECODE)["name"] == "fast | 2"  # type: ignore[index]
    assert table.best_of_ours(DECODE)["name"] == "Piecework a"  # type: ignore[index]
    assert table.best_peer(row("decode", engine("Piecework a", True, 1.0))) is None


def test_the_summary_has_each_variant_of_ours_and_all_engines_stand_in_the_other_table() -> None:
    assert table.summary([DECODE]) == [
        ["int8", "decode", "Piecework a", "6.0", "0.60", "fast | 2", "4.0", "1.00", "abc"],
        ["int8", "decode", "Piecework b", "2.0", "0.20", "fast | 2", "4.0", "0.50", "abc"],
    ]
    lines = table.everything([DECODE])
    assert [line[2] for line in lines] == [one["name"] for one in DECODE["engines"]]
    assert lines[2][3:] == ["1.0", "0.0", "0.10", "4.00", "128/128", "2%"]
    assert lines[4][3:] == ["-"] * 4 + ["not timed: it ended: no memory", "-"]
    assert all(len(line) == len(table.ALL_HEAD) for line in lines)
    page = table.markdown(table.ALL_HEAD, lines)
    assert {line.count("|") for line in page.splitlines()} == {len(table.ALL_HEAD) + 1}


def test_only_decode_has_a_share_of_the_floor() -> None:
    assert table.summary([row("prefill", engine("Piecework a", True, 200.0))]) == [
        ["int8", "prefill", "Piecework a", "200", "-", "-", "-", "-", "abc"]
    ]


@pytest.mark.parametrize(
    ("name", "speed"),
    [("decode", 2 / 0.1), ("prefill", 2 * 16 / 0.5), ("output", 8 / 1.7)],
)
def test_speeds_are_counted_from_arrivals(name: str, speed: float) -> None:
    times = [[0.5, 0.6, 0.7, 1.6], [0.4, 0.5, 0.6, 1.7]]
    assert Case("x", name, 2, 16, 4, 1).speed(times) == pytest.approx(speed)


def test_agreement_counts_up_to_the_first_difference() -> None:
    found = agreement([[1, 2, 3], [1, 2, 3], [1, 2, 3]], [[1, 2, 3], [1, 9, 3], [9, 2, 3]])
    assert (found.equal, found.tokens, found.begun, found.prompts) == (4, 9, 2, 3)
    assert str(found) == "4/9" and found.plausible
    assert not agreement([[1], [1]], [[1], [2]]).plausible


def test_every_contender_has_a_runner_and_every_precision_one_of_ours_first() -> None:
    runners = Path(report.__file__).with_name("runners")
    for contenders in PRECISIONS.values():
        assert contenders[0].ours and not all(c.ours for c in contenders)
        assert len({c.name for c in contenders}) == len(contenders)
        for contender in contenders:
            assert (runners / f"{contender.engine}.py").exists() and contender.engine in ENVIRONMENT


def test_the_description_names_no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = describe()
    assert re.fullmatch(r"[0-9a-f]{7,}\+?|\?", commit())
    assert machine["cores"] >= 1 and machine["memory_gb"] >= 1
    assert str(machine["cores"]) in file_name(machine) and machine["torch"] in sentence(machine)
    assert not {"/", "node", "host"} & set(" ".join(map(str, machine)).split())


class Counting:
    """An engine that counts on from the last token of each prompt."""

    def __init__(self, model: str, threads: int) -> None:
        if model == "missing":
            raise ValueError("no such model")
        self.facts = {"version": model, "weight_bytes": threads}

    def generate(self, prompts: Tokens, output_len: int) -> tuple[Tokens, Times]:
        return [[ids[-1] + i + 1 for i in range(output_len)] for ids in prompts], [[0.5] * output_len]

    def floor(self) -> dict[str, float]:
        return {"bytes": 8.0, "seconds": 2.0}


def test_an_engine_answers_line_by_line_and_tells_what_fails() -> None:
    messages = [
        {"op": "load", "model": "missing", "threads": 1},
        {"op": "load", "model": "m", "threads": 2},
        {"op": "generate", "prompts": [[3], [7]], "output_len": 2},
        {"op": "floor"},
        {"op": "nothing"},
    ]
    out = io.StringIO()
    answer(map(json.dumps, messages), out, Counting)
    replies = [json.loads(line) for line in out.getvalue().splitlines()]
    assert replies[0] == {"error": "ValueError: no such model"}
    assert replies[1] == {"version": "m", "weight_bytes": 2}
    assert replies[2] == {"tokens": [[4, 5], [8, 9]], "times": [[0.5, 0.5]]}
    assert replies[3] == {"bytes": 8.0, "seconds": 2.0}
    assert replies[4]["error"].startswith("AttributeError")


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="CPU time of others is read there")
def test_a_run_beside_a_busy_process_is_told_from_one_alone() -> None:
    def spin() -> int:
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
        return 7

    result, alone = Machine(0.0).timed(os.getpid(), spin)
    with subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=-1) as busy:
        assert busy.stdout is not None and busy.stdout.readline()
        _, beside = Machine(0.0).timed(busy.pid, spin)
        busy.kill()
    assert result == 7 and alone is not None and beside is not None
    # This process is "others" only to the one that spun beside it.
    assert beside >= 0.15 / (os.cpu_count() or 1)


def test_patience_ends() -> None:
    machine = Machine(0.2)
    calls: list[int] = []
    machine.timed(os.getpid(), lambda: calls.append(1))
    assert 1 <= len(calls) <= 3


def test_an_engine_that_cannot_start_says_its_last_words(tmp_path: Path) -> None:
    process = EngineProcess(sys.executable, "nothing", tmp_path / "log")
    try:
        with pytest.raises(EngineError, match=r"it ended: .*No module named"):
            process.ask("load")
    finally:
        process.close()


def test_a_second_run_replaces_its_rows_and_keeps_the_others(tmp_path: Path) -> None:
    machine = {**describe(), "cpu": "A CPU"}
    first = {"model": "m", "threads": 2, "machine": machine, "rows": [DECODE], "servers": []}
    report.save(tmp_path, "x", first)
    newer = row("decode", engine("Piecework a", True, 9.0), engine("fast", False, 3.0))
    again = {**first, "rows": [row("batch 8", engine("Piecework a", True, 1.0)), newer]}
    again["rows"][1]["case"] = "decode"
    merged = report.save(tmp_path, "x", again)
    assert [r["case"] for r in merged["rows"]] == ["decode", "batch 8"]
    assert merged["rows"][0]["engines"][0]["speeds"] == [9.0]
    page = (tmp_path / "x.md").read_text()
    assert "| int8 | decode | Piecework a | 9.0 | 0.90 | fast | 3.0 | 3.00 |" in page


def test_servers_stand_side_by_side() -> None:
    keys = ("output_throughput", "request_throughput", "median_ttft_ms", "p99_ttft_ms")
    keys += ("median_itl_ms", "p99_itl_ms", "total_output_tokens", "completed")
    (line,) = serving.lines([{"name": "s", **dict.fromkeys(keys, 1.0)}])
    assert len(line) == len(serving.SERVING_HEAD)


@pytest.mark.slow
def test_piecework_and_transformers_run_by_turns_over_their_pipes(tmp_path: Path) -> None:
    """A tiny model of random weights, in the processes that the benchmark uses."""
    contenders = [
        Contender("piecework", "float32", "float", {"dtype": "float32"}),
        Contender("transformers", "float32", "float", {"dtype": "float32"}),
        Contender("transformers", "int5", "float", {"dtype": "int5"}),
    ]
    model = save_tiny(tmp_path, "llama")
    prompts: Tokens = [[1, 2, 3], [9, 8]]
    checked = (prompts, reference(contenders[1], model, tmp_path, prompts, 1))
    case, quiet = Case("decode", "decode", 2, 5, 4, 2), Machine(0.0)
    (found,) = run_precision(contenders, [case], {"float": model}, tmp_path, checked, 1, quiet)
    ours, peer, broken = found["engines"]
    assert ours["tokens_as_reference"] == peer["tokens_as_reference"] == "32/32"
    assert len(ours["speeds"]) == len(peer["floors"]) == 2 and min(ours["speeds"] + peer["floors"]) > 0
    assert ours["weight_bytes"] <= peer["weight_bytes"] < 1.5 * ours["weight_bytes"]
    assert broken["error"].startswith("not loaded: ValueError") and broken["speeds"] == []

    wrong: tuple[Tokens, Tokens] = (prompts, [[-1] * 16] * 2)
    with pytest.raises(EngineError, match=r"Piecework float32: wrong tokens: 0 of 2 prompts"):
        next(run_precision(contenders[:1], [case], {"float": model}, tmp_path, wrong, 1, quiet))
