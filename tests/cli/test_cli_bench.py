"""`piecework bench` on a tiny model: the keys of its JSON, and figures that fit together."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_run import Run

from piecework.bench.own_server import own_server
from piecework.errors import ModelError


def test_latency(run: Run, tiny: Path) -> None:
    shape = [
        "--input-len",
        "8",
        "--output-len",
        "5",
        "--batch-size",
        "3",
        "--num-iters",
        "2",
        "--num-iters-warmup",
        "0",
    ]
    done = run("bench", "latency", "--model", str(tiny), "--dtype", "float32", *shape, "--profile", "--json")
    assert done.code == 0, done.err
    (report,) = done.lines
    assert (report["outputs_equal"], report["outputs_compared"]) == (3, 3)
    assert len(report["latencies"]) == 2
    assert 0 < report["median_ttft_ms"] < report["percentiles"]["50"] * 1e3
    assert report["decode_tok_s"] == pytest.approx(3 / report["step_ms"] * 1e3)
    assert report["weight_gb_s"] == pytest.approx(report["step_bytes"] / report["step_ms"] / 1e6)
    assert report["step_over_floor"] == pytest.approx(report["step_ms"] / report["floor_ms"])
    timers = report["profile"]["timers"]
    assert timers["decode.run"]["count"] == 2 * 4  # the check and the warm-up are not in it


def test_latency_counts_the_weights_that_a_step_reads(run: Run, tiny: Path) -> None:
    from safetensors import safe_open

    shape = ["--input-len", "4", "--output-len", "2", "--num-iters", "1", "--num-iters-warmup", "0"]
    (report,) = run("bench", "latency", "--model", str(tiny), "--dtype", "float32", *shape, "--json").lines
    with safe_open(tiny / "model.safetensors", "pt") as file:
        read = sum(file.get_tensor(k).nbytes for k in file.keys() if "embed_tokens" not in k)  # noqa: SIM118
    assert report["step_bytes"] == pytest.approx(read)


def test_latency_prints_a_block(run: Run, tiny: Path) -> None:
    shape = ["--input-len", "4", "--output-len", "1", "--num-iters", "1", "--num-iters-warmup", "0"]
    int8 = ["--dtype", "float32", "--quantization", "w8a8-dynamic", "--lm-head", "w8", "--no-repack"]
    done = run("bench", "latency", "--model", str(tiny), *shape, *int8)
    assert "Latency Benchmark Result" in done.out
    ran = f"{tiny}, float32 on cpu, quantisation w8a8-dynamic with a head in w8, weights not repacked."
    assert f"{ran} Tokens: 1 of 1 equal to the output alone." in done.out
    assert "Decode" not in done.out  # one token has no decode step


def test_latency_beside_another_engine(run: Run, tiny: Path) -> None:
    shape = ["--input-len", "4", "--output-len", "3", "--num-iters", "2", "--dtype", "float32"]
    command = ["bench", "latency", "--model", str(tiny), *shape, "--disable-passes", "add_rms_norm"]
    other = '{"max_model_len": 64, "compilation_config": {"strict": true}}'
    (report,) = run(*command, "--against", other, "--json").lines
    found = report["against"]
    assert found["check"] == "1 of 1 equal to the output alone"
    assert len(found["latencies"]) == len(report["latencies"]) == 2
    assert min(found["latency_ratio"], found["prefill_ratio"], found["step_ratio"]) > 0
    done = run(*command, "--against", '{"quantization": "w8", "repack": false}')
    assert "Times of the other engine, over these" in done.out and "Decode step:" in done.out
    beside = f"The other engine: {tiny}, float32 on cpu, quantisation w8, weights not repacked."
    assert done.out.rstrip().endswith(f"equal to the output alone. {beside}")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("[1]", "against=[1] is not allowed: a JSON object"),
        ("{", "against='{' is not allowed: a JSON object"),
        ('{"no_such": 1}', "no_such"),
        ('{"compilation_config": {"compiler": "no_such"}}', "compiler='no_such' is not allowed"),
    ],
)
def test_another_engine_that_can_not_be_is_refused(run: Run, tiny: Path, other: str, said: str) -> None:
    done = run("bench", "latency", "--model", str(tiny), "--against", other)
    assert done.code == 2 and said in done.err


def test_latency_refuses_what_does_not_fit(run: Run, tiny: Path) -> None:
    done = run("bench", "latency", "--model", str(tiny), "--input-len", "250", "--output-len", "50")
    assert done.code == 2 and "input_len=250 and output_len=50 do not fit" in done.err


def test_throughput(run: Run, tiny: Path) -> None:
    shape = ["--num-prompts", "6", "--input-len", "8", "--output-len", "4", "--dtype", "float32"]
    (report,) = run("bench", "throughput", "--model", str(tiny), *shape, "--json").lines
    assert (report["total_input_tokens"], report["total_output_tokens"]) == (48, 24)
    assert report["tokens_per_second"] == pytest.approx(72 / report["elapsed_time"])
    assert (report["outputs_equal"], report["outputs_compared"]) == (2, 2)
    assert report["steps"] >= 4


def test_throughput_of_conversations(run: Run, tiny: Path, tmp_path: Path) -> None:
    talk = '{"conversations": [{"value": "the one in the other"}, {"value": "in a one"}]}'
    (tmp_path / "talks.json").write_text(f"[{talk}]")
    data = ["--dataset", "sharegpt", "--dataset-path", str(tmp_path / "talks.json")]
    done = run("bench", "throughput", "--model", str(tiny), *data, "--num-prompts", "2")
    assert done.code == 0, done.err
    assert "Throughput Benchmark Result" in done.out


@pytest.mark.slow
def test_serving_starts_and_stops_its_own_server(run: Run, tiny: Path) -> None:
    shape = [
        "--num-prompts",
        "4",
        "--input-len",
        "6",
        "--output-len",
        "5",
        "--max-concurrency",
        "2",
        "--threads",
        "1",
    ]
    flags = ["--dtype", "float32", "--api-key", "secret", "--json"]
    done = run("bench", "serving", "--model", str(tiny), *shape, *flags)
    assert done.code == 0, done.err + done.out
    (report,) = done.lines
    assert (report["completed"], report["failed"]) == (4, 0)
    assert report["total_output_tokens"] == 20
    assert (report["outputs_equal"], report["outputs_compared"]) == (2, 2)
    assert report["model_id"] == str(tiny)


def test_serving_tells_why_its_server_did_not_start() -> None:
    with pytest.raises(ModelError) as caught, own_server({"page_size": 0}, None):
        pass
    assert "the server ended with exit code 2 before it listened" in str(caught.value)
    assert "page_size=0 is not allowed" in str(caught.value)


def test_workers(run: Run) -> None:
    flags = ["--steps", "20", "--step-sizes", "1,8", "--children", "1", "--idle-seconds", "0.1"]
    (report,) = run("bench", "workers", *flags, "--json").lines
    assert [hop["requests"] for hop in report["hops"]] == [1, 8]
    assert all(0 < hop["median_us"] <= hop["p95_us"] and hop["bytes"] > 0 for hop in report["hops"])
    assert report["start_ms"] > 0 and report["idle"]["child"] >= 0
    done = run("bench", "workers", *flags)
    assert "round trip" in done.out and "without torch" in done.out
