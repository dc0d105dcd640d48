"""Statistics, datasets, arrival times, cost model and options of the benchmarks."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecework.bench.cost import Cost
from piecework.bench.datasets import random_lengths, random_requests, sharegpt_requests, words_tokens
from piecework.bench.floor import ReadFloor
from piecework.bench.latency import Iteration, ratios
from piecework.bench.load import arrival_times
from piecework.bench.offline import compare
from piecework.bench.options import LatencyOptions, ServingOptions, ThroughputOptions
from piecework.bench.report import block, profile_table
from piecework.bench.stats import describe_ms, percentile
from piecework.errors import ConfigError
from piecework.profile import Profile


def test_ratios_are_medians_of_pairs() -> None:
    ours = [Iteration(1.0, 0.5, 1.0, 0.0), Iteration(2.0, 0.5, 2.0, 0.0), Iteration(4.0, 0.5, 4.0, 0.0)]
    others = [Iteration(2.0, 0.4, 2.0, 0.0), Iteration(3.0, 0.5, 3.0, 0.0), Iteration(1.0, 1.0, 1.0, 0.0)]
    found = ratios(ours, others)
    assert (found["latency_ratio"], found["prefill_ratio"], found["step_ratio"]) == (1.5, 1.0, 1.5)
    assert ratios(ours, [Iteration(1.0, 0.5, None, 0.0)] * 3)["step_ratio"] is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentile_is_numpys(values: list[float], share: float) -> None:
    assert percentile(values, share) == pytest.approx(np.percentile(values, share), rel=1e-9, abs=1e-6)


def test_percentile_of_nothing_is_nan() -> None:
    assert math.isnan(percentile([], 50))


def test_describe() -> None:
    found = describe_ms("x", [0.001, 0.002, 0.003])
    assert found["mean_x_ms"] == found["median_x_ms"] == pytest.approx(2.0)
    assert found["std_x_ms"] == pytest.approx(np.std([1, 2, 3]))
    assert set(describe_ms("x", []).values()) == {0.0}


def test_random_requests_have_their_lengths_and_repeat() -> None:
    first = random_requests(5, 20, 7, 0.0, 3, words_tokens)
    assert [words_tokens(request.prompt) for request in first] == [20] * 5
    assert {request.output_len for request in first} == {7}
    assert first == random_requests(5, 20, 7, 0.0, 3, words_tokens)
    assert first != random_requests(5, 20, 7, 0.0, 4, words_tokens)
    assert len({request.prompt for request in first}) == 5


def test_random_prompts_are_cut_to_what_the_tokenizer_counts() -> None:
    (request,) = random_requests(1, 30, 1, 0.0, 0, len)  # one token a character
    assert 20 <= len(request.prompt) <= 30


def test_random_lengths_stay_in_range() -> None:
    lengths = random_lengths(200, 100, 0.25, random.Random(0))
    assert min(lengths) >= 75 and max(lengths) <= 125 and len(set(lengths)) > 20
    assert random_lengths(3, 1, 1.0, random.Random(0)) >= [1, 1, 1]


def _sharegpt(folder: Path, entries: Any) -> str:
    path = folder / "talks.json"
    path.write_text(json.dumps(entries))
    return str(path)


def _talk(question: str, answer: str) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}


def test_sharegpt_takes_usable_first_turns(tmp_path: Path) -> None:
    entries = [
        _talk("one two three four", "a b c d e"),
        _talk("too short", "a b c d e"),
        _talk("word " * 2000, "a b c d e"),
        {"conversations": [{"value": "alone"}]},
    ]
    found = sharegpt_requests(_sharegpt(tmp_path, entries), 3, None, 0, words_tokens)
    assert [request.prompt for request in found] == ["one two three four"] * 3
    assert {request.output_len for request in found} == {5}
    (fixed,) = sharegpt_requests(_sharegpt(tmp_path, entries[:1]), 1, 9, 0, words_tokens)
    assert fixed.output_len == 9


@pytest.mark.parametrize("entries", [{"a": 1}, [{"turns": []}], [3], [_talk("a", "b")], []])
def test_bad_sharegpt_files_are_refused(tmp_path: Path, entries: Any) -> None:
    with pytest.raises(ConfigError, match="dataset_path"):
        sharegpt_requests(_sharegpt(tmp_path, entries), 1, None, 0, words_tokens)


def test_missing_sharegpt_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a readable JSON file"):
        sharegpt_requests(str(tmp_path / "none.json"), 1, None, 0, words_tokens)


def test_arrivals_are_poisson() -> None:
    times = arrival_times(4000, 50.0, seed=1)
    gaps = np.diff(times)
    assert times[0] == 0.0 and (gaps > 0).all()
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.1)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.1)  # of an exponential: its mean
    assert arrival_times(3, math.inf, 0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "values", "field"),
    [
        (ServingOptions, {"request_rate": 0.0}, "request_rate"),
        (ServingOptions, {"num_prompts": 0}, "num_prompts"),
        (ServingOptions, {"endpoint": "embeddings"}, "endpoint"),
        (ServingOptions, {"dataset": "sharegpt"}, "dataset_path"),
        (ServingOptions, {"range_ratio": 1.5}, "range_ratio"),
        (ThroughputOptions, {"dataset_path": "f"}, "dataset_path"),
        (LatencyOptions, {"batch_size": 0}, "batch_size"),
    ],
)
def test_options_are_checked(options: type, values: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options(**values)
    assert caught.value.field == field


def test_cost_of_a_dense_model() -> None:
    cost = Cost(dense=100, head=40, experts=0, num_experts=0, top_k=0, itemsize=2)
    assert cost.step_bytes(1) == cost.step_bytes(64) == 280
    assert (cost.token_flops(head=False), cost.token_flops(head=True)) == (200, 280)


def test_cost_of_experts_grows_with_the_rows_that_choose_them() -> None:
    cost = Cost(dense=0, head=0, experts=800, num_experts=8, top_k=2, itemsize=1)
    assert cost.step_bytes(1) == pytest.approx(200)
    assert cost.step_bytes(2) == pytest.approx(800 * (1 - 0.75**2))
    assert cost.step_bytes(1000) == pytest.approx(800)
    assert cost.token_flops(head=True) == pytest.approx(400)


def test_compare_finds_the_first_difference() -> None:
    assert str(compare([[1, 2], [3, 4]], [[1, 2], [3, 4]])) == "2 of 2 equal to the output alone"
    check = compare([[1, 2, 3], [3, 4], [1]], [[1, 2, 9], [3, 4], [1, 1]])
    assert (check.compared, check.equal, check.first_difference) == (3, 1, 1)
    assert "earliest difference is at token 1" in str(check)


def test_floor_scales_with_the_bytes() -> None:
    small, large = ReadFloor(4_000_000), ReadFloor(64_000_000)
    fast = min(small.read() for _ in range(5))
    slow = min(large.read() for _ in range(5))
    assert 0 < fast < slow
    assert 64_000_000 / slow < 2e12  # a rate that no memory has would mean that nothing was read


def test_block_lines_up() -> None:
    text = block("Title", [("Count:", 3), "Part", ("Rate (tok/s):", 1.234)])
    assert text.splitlines() == [
        " Title ".center(50, "="),
        f"{'Count:':<40} 3",
        "Part".center(50, "-"),
        f"{'Rate (tok/s):':<40} 1.23",
        "=" * 50,
    ]


def test_profile_table_names_everything() -> None:
    profile = Profile(enabled=True)
    profile.add_time("decode.run", 0.5)
    profile.add_bytes("copy", 2048)
    profile.count("hits", 7)
    lines = profile_table(profile.snapshot()).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["decode.run", "1", "500.0", "500.000", "500.000"],
        ["copy", "1", "2.0", "KiB"],
        ["hits", "7"],
    ]
