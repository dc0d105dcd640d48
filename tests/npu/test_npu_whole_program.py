"""Whole-program mode on the device `npu`, from the settings down to a stub of a compiler."""

from __future__ import annotations

from typing import Any

import pytest
from npu_tokens import DEFAULT_VOCABULARY, VOCABULARY, check_equal, run
from shrinking_batches import CAPTURED
from stub_vendor import Vendor, registered

from piecework.devices.sim.memory import SimMemory
from piecework.engine.result import Result

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CONFIG = {"compiler": "dynamo:stub_vendor", "splitting_ops": [], "decode_capture_sizes": CAPTURED}
SETTINGS = {"device": "npu", "page_size": 128, "compilation_config": CONFIG}


@pytest.mark.parametrize(
    ("kind", "quantization"), [("qwen3", "auto"), ("qwen3_moe", "auto"), ("qwen3", "w8a8-dynamic")]
)
def test_tokens_are_those_of_the_eager_engine(
    kind: str,
    quantization: str,
    tiny_path: Any,
    expected: Any,
    twin: Any,
    float32: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wanted = expected(kind, quantization)
    with registered(Vendor()) as vendor:
        found, counters, layers = run(tiny_path(kind), {**SETTINGS, "quantization": quantization}, VOCABULARY)
    check_equal(wanted, found)
    assert vendor.whole == [(size, layers) for size in sorted(CAPTURED, reverse=True)]
    assert vendor.calls - len(CAPTURED) == counters.whole_runs > 0 and counters.captures == 0
    assert vendor.pieces == counters.distinct + 1, "those of prefill, and the head"
    assert "decode of 3 rows runs in pieces; there are whole programs of exactly 1, 2, 4" in caplog.text


def test_the_default_model(default_expected: list[Result], twin: Any, float32: None) -> None:
    twin.memory = SimMemory(3 << 29)
    with registered(Vendor()) as vendor:
        found, counters, layers = run("smollm2-135m", SETTINGS, DEFAULT_VOCABULARY, 32)
    check_equal(default_expected, found)
    assert vendor.whole == [(size, layers) for size in sorted(CAPTURED, reverse=True)]
    assert counters.whole_runs > 0 and counters.captures == 0
