"""The figures of a benchmark as text for a person."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from piecework.profile import Snapshot
from piecework.units import format_size

_WIDTH = 50
_LATENCIES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}

Row = tuple[str, Any]


def serving_block(report: Mapping[str, Any]) -> str:
    """Return the block "Serving Benchmark Result" with the lines that vLLM and SGLang print."""
    rows: list[Row | str] = [
        ("Successful requests:", report["completed"]),
        ("Failed requests:", report["failed"]),
        ("Maximum request concurrency:", report["max_concurrency"] or "no limit"),
        ("Request rate configured (RPS):", report["request_rate"]),
        ("Benchmark duration (s):", report["duration"]),
        ("Total input tokens:", report["total_input_tokens"]),
        ("Total generated tokens:", report["total_output_tokens"]),
        ("Request throughput (req/s):", report["request_throughput"]),
        ("Output token throughput (tok/s):", report["output_throughput"]),
        ("Total token throughput (tok/s):", report["total_token_throughput"]),
        ("Peak concurrent requests:", report["max_concurrent_requests"]),
    ]
    for key, (short, title) in _LATENCIES.items():
        rows.append(title)
        for kind in ("mean", "median", "std", "p99"):
            label = kind.upper() if kind == "p99" else kind.capitalize()
            rows.append((f"{label} {short} (ms):", report[f"{kind}_{key}_ms"]))
    text = block("Serving Benchmark Result", rows)
    compared = report["outputs_compared"]
    if compared:
        text += f"\n{report['outputs_equal']} of {compared} texts under load equal to the text alone."
    for message, count in report["errors"].items():
        text += f"\n{count} failed: {message}"
    return text


def latency_block(report: Mapping[str, Any]) -> str:
    """Return the result of `bench latency`."""
    rows: list[Row | str] = [
        ("Batch size:", report["batch_size"]),
        ("Input, output tokens each:", f"{report['input_len']}, {report['output_len']}"),
        ("Mean latency of a batch (s):", report["avg_latency"]),
        ("Median latency (s):", report["percentiles"]["50"]),
        ("P99 latency (s):", report["percentiles"]["99"]),
        "Prefill",
        ("Median TTFT (ms):", report["median_ttft_ms"]),
        ("Prefill throughput (tok/s):", report["prefill_tok_s"]),
        ("Prefill rate (GFLOP/s):", report["prefill_gflop_s"]),
    ]
    if report["step_ms"] is not None:
        rows += [
            "Decode",
            ("Median step (ms):", report["step_ms"]),
            ("Decode throughput (tok/s):", report["decode_tok_s"]),
            ("Decode rate (GFLOP/s):", report["decode_gflop_s"]),
            ("Weights read (GB/s):", report["weight_gb_s"]),
            ("Read floor (ms):", report["floor_ms"]),
            ("Read floor (GB/s):", report["floor_gb_s"]),
            ("Step over floor:", f"{report['step_over_floor']:.2f}x"),
        ]
    other = report.get("against")
    if other is not None:
        rows += [
            "Times of the other engine, over these",
            ("Latency:", f"{other['latency_ratio']:.3f}x"),
            ("Prefill:", f"{other['prefill_ratio']:.3f}x"),
        ]
        if other["step_ratio"] is not None:
            rows.append(("Decode step:", f"{other['step_ratio']:.3f}x"))
        rows.append(("Its tokens:", other["check"]))
    return _with_notes(block("Latency Benchmark Result", rows), report)


def throughput_block(report: Mapping[str, Any]) -> str:
    """Return the result of `bench throughput`."""
    rows: list[Row | str] = [
        ("Requests:", report["num_requests"]),
        ("Duration (s):", report["elapsed_time"]),
        ("Total input tokens:", report["total_input_tokens"]),
        ("Total generated tokens:", report["total_output_tokens"]),
        ("Request throughput (req/s):", report["requests_per_second"]),
        ("Output token throughput (tok/s):", report["output_tokens_per_second"]),
        ("Total token throughput (tok/s):", report["tokens_per_second"]),
        ("Steps:", report["steps"]),
        ("Preemptions:", report["preemptions"]),
        ("Rate (GFLOP/s):", report["gflop_s"]),
        ("Weights read (GB/s):", report["weight_gb_s"]),
        ("Read floor (GB/s):", report["floor_gb_s"]),
    ]
    return _with_notes(block("Throughput Benchmark Result", rows), report)


def profile_table(snapshot: Snapshot) -> str:
    """Return the timers, byte counters and event counters of a profile as a table."""
    width = max(32, *map(len, [*snapshot["timers"], *snapshot["bytes"], *snapshot["counters"]]))
    lines = [f"{'timer':<{width}} {'count':>8} {'total ms':>12} {'mean ms':>10} {'max ms':>10}"]
    for name, timer in snapshot["timers"].items():
        figures = f"{timer['total_ms']:>12.1f} {timer['mean_ms']:>10.3f} {timer['max_ms']:>10.3f}"
        lines.append(f"{name:<{width}} {timer['count']:>8} {figures}")
    for name, sizes in snapshot["bytes"].items():
        lines.append(f"{name:<{width}} {sizes['count']:>8} {format_size(sizes['total']):>12}")
    lines += [f"{name:<{width}} {count:>8}" for name, count in snapshot["counters"].items()]
    return "\n".join(lines)


def what_ran_line(report: Mapping[str, Any]) -> str:
    """Say which model ran, in which form and where."""
    laid_out = "repacked" if report["repacked"] else "not repacked"
    return (
        f"{report['model_id']}, {report['dtype']} on {report['device']}, "
        f"quantisation {report['quantized']}, weights {laid_out}."
    )


def block(title: str, rows: Iterable[Row | str]) -> str:
    """Return rows of a label and a value between rules; a plain string is a heading."""
    lines = [f" {title} ".center(_WIDTH, "=")]
    for row in rows:
        if isinstance(row, str):
            lines.append(row.center(_WIDTH, "-"))
        else:
            label, value = row
            lines.append(f"{label:<40} {f'{value:.2f}' if isinstance(value, float) else value!s:<9}".rstrip())
    return "\n".join([*lines, "=" * _WIDTH])


def _with_notes(text: str, report: Mapping[str, Any]) -> str:
    text += f"\n{what_ran_line(report)} Tokens: {report['check']}."
    if "against" in report:
        text += f" The other engine: {what_ran_line(report['against'])}"
    return f"{text}\n\n{profile_table(report['profile'])}" if "profile" in report else text
