"""The figures of an evaluation as text for a person."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piecework.bench.report import block


def gsm8k_block(report: Mapping[str, Any]) -> str:
    """Return the result of `eval gsm8k`, with the lines that SGLang's benchmark prints."""
    text = block(
        "GSM8K Result",
        [
            ("Questions:", report["num_questions"]),
            ("Examples before each:", report["num_shots"]),
            ("Accuracy:", f"{report['accuracy']:.3f}"),
            ("Invalid:", f"{report['invalid']:.3f}"),
            ("Cut at max_tokens:", f"{report['cut']:.3f}"),
            ("Failed requests:", report["failed"]),
            ("Latency (s):", report["latency"]),
            ("Total input tokens:", report["total_input_tokens"]),
            ("Total generated tokens:", report["total_output_tokens"]),
            ("Output throughput (tok/s):", report["output_throughput"]),
        ],
    )
    for message, count in report["errors"].items():
        text += f"\n{count} failed: {message}"
    return f"{text}\n{_where(report)}"


def perplexity_block(report: Mapping[str, Any]) -> str:
    """Return the result of `eval perplexity`."""
    text = block(
        "Perplexity Result",
        [
            ("Perplexity:", f"{report['perplexity']:.4f}"),
            ("Mean negative log likelihood:", f"{report['nll']:.5f}"),
            ("Tokens scored:", report["scored_tokens"]),
            ("Tokens read:", f"{report['tokens']} of {report['text_tokens']}"),
            ("Windows:", f"{report['windows']} of {report['context']}, stride {report['stride']}"),
            ("Latency (s):", report["latency"]),
            ("Throughput (tok/s):", report["tokens_per_second"]),
        ],
    )
    return f"{text}\n{_where(report)}"


def _where(report: Mapping[str, Any]) -> str:
    if "base_url" in report:
        return f"{report['model_id']} at {report['base_url']}."
    return f"{report['model_id']}, {report['dtype']} on {report['device']}."
