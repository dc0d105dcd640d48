"""Whole programs: a stub of a compiler gets decode with attention inside, one batch size at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from capture_rig import Rig, prompt
from stub_vendor import Vendor, registered

from piecework.capture.buffers import StaticBuffers
from piecework.capture.options import CaptureOptions
from piecework.compilation import CompilationConfig
from piecework.compile.base import CompileContext, CompileError
from piecework.compile.dynamo import DynamoCompiler
from piecework.devices.sim import SimDevice
from piecework.errors import CaptureError, ConfigError
from piecework.runner.recipe import check_splitting_ops
from piecework.runner.whole import WholeDecode

SIZES = (1, 2, 4)


@pytest.fixture
def vendor() -> Iterator[Vendor]:
    with registered(Vendor()) as made:
        yield made


def whole_rig(kind: str, lengths: str, strict: bool = False) -> Rig:
    device = SimDevice(capacity=1 << 26, lengths=lengths)  # type: ignore[arg-type]
    rig = Rig(kind, device, CaptureOptions("eager", "eager", whole_sizes=SIZES), strict=strict)
    rig.buffers = StaticBuffers(device, tokens=4, sequences=4, table_width=16)
    context = CompileContext(device)
    whole = WholeDecode(rig.program, DynamoCompiler("stub_vendor"), SIZES, rig.cache, rig.buffers, context)
    rig.runner = rig.make_runner(whole=whole)
    return rig


@pytest.mark.parametrize(("kind", "lengths"), [("qwen3", "host"), ("qwen3_moe", "device")])
def test_numbers_are_those_of_the_eager_model(
    kind: str, lengths: str, vendor: Vendor, caplog: pytest.LogCaptureFixture
) -> None:
    rig = whole_rig(kind, lengths)
    assert vendor.whole == [(4, 2), (2, 2), (1, 2)], "sizes, and attention in both layers"
    rig.check(*(rig.item(b, prompt(3 + b, seed=b)) for b in range(4)))
    for batch in (4, 2, 1, 3, 4):
        rig.check(*(rig.item(b, [5 + b]) for b in range(batch)))
    assert rig.counters.whole_runs == 4
    assert vendor.calls == 4 + len(SIZES), "each was tried once"
    assert rig.counters.eager_runs == 2, "prefill, and the batch of 3"
    assert "decode of 3 rows runs in pieces; there are whole programs of exactly 1, 2, 4" in caplog.text


WRONG: list[tuple[Callable[[Any], Any], str]] = [
    (lambda results: results[0], "its code gives a Tensor and not ([4, 32] float32)"),
    (lambda results: None, "its code gives None and not ([4, 32] float32)"),
    (lambda results: (), "its code gives () and not ([4, 32] float32)"),
    (lambda results: (results[0][:1],), "its code gives ([1, 32] float32) and not ([4, 32] float32)"),
    (lambda results: [results[0].double()], "its code gives ([4, 32] float64) and not ([4, 32] float32)"),
    (
        lambda results: results[9],
        "its program of 4 sequences fails at the first run: IndexError: tuple index",
    ),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_what_gives_no_hidden_states_is_refused_at_the_start(
    change: Callable[[Any], Any], message: str, vendor: Vendor
) -> None:
    vendor.change = change
    with pytest.raises(CompileError, match="the compiler dynamo:stub_vendor failed: " + re.escape(message)):
        whole_rig("qwen3", "host")


def test_a_compiler_that_gives_no_function_is_refused(vendor: Vendor) -> None:
    vendor.gives_function = False
    with pytest.raises(CompileError, match="failed: it gave None and no function"):
        whole_rig("qwen3", "host")


def test_another_size_is_refused_in_strict_mode(vendor: Vendor) -> None:
    rig = whole_rig("qwen3", "host", strict=True)
    rig.check(*(rig.item(b, prompt(3)) for b in range(3)))
    with pytest.raises(CaptureError, match="decode of 3 rows runs in pieces; there are whole programs of ex"):
        rig.run(*(rig.item(b, [5]) for b in range(3)))


def test_the_empty_list_is_for_vendors_compilers_alone() -> None:
    assert CompilationConfig(compiler="dynamo:anything", splitting_ops=()).whole_program
    assert not CompilationConfig(compiler="eager", splitting_ops=()).whole_program
    with pytest.raises(ConfigError, match="an empty one with compiler dynamo:<name>"):
        check_splitting_ops(())
