"""`bench kernels`: its numbers are checked before it times, and its figures fit together."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from piecework import ops
from piecework.bench import kernel_timing
from piecework.bench.floor import CopyLimit
from piecework.bench.kernel_cases import OPS, Inputs, as_tensors, make_case
from piecework.bench.kernel_timing import Timer, alternate
from piecework.bench.kernels import difference
from piecework.cli.main import main
from piecework.devices import make_device

QUICK = ["--repeats", "2", "--sample-ms", "0.05", "--json"]


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CopyLimit, "sizes", (2**16, 2**20))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def call(*flags: str, code: int = 0) -> dict[str, Any]:
        capsys.readouterr()
        assert main(["bench", "kernels", *QUICK, *flags]) == code
        return json.loads(capsys.readouterr().out)

    return call


def test_every_fused_op_can_be_timed() -> None:
    modules = {name: ops.get(name).reference.__module__ for name in ops.names()}
    assert {name for name, module in modules.items() if ".fused_" in module} == set(OPS)


@pytest.mark.parametrize(("device", "timed"), [("cpu", OPS), ("sim", ("add_rms_norm_quant",))])
def test_figures_fit_together(
    device: str, timed: tuple[str, ...], run: Callable[..., dict[str, Any]]
) -> None:
    shape = ["--hidden", "64", "--tokens", "1,5", "--dtype", "float32"]
    report = run("--device", device, "--ops", ",".join(timed), *shape)
    assert (report["wrong"], report["captured"]) == (0, device == "sim")
    assert {row["op"] for row in report["rows"]} == set(timed)
    assert {(row["hidden"], row["tokens"]) for row in report["rows"]} == {(64, 1), (64, 5)}
    for row in report["rows"]:
        assert row["gb_s"] == pytest.approx(row["nbytes"] / row["fused_us"] / 1e3)
        assert row["limit_share"] == pytest.approx(row["gb_s"] / row["limit_gb_s"])
        assert row["suspicious"] == (row["limit_share"] > 1)
        assert row["ratio"] > 0 and row["unfused_us"] >= row["fastest_unfused_us"] > 0
        fastest = row["fastest_unfused_us"] / row["fastest_fused_us"]
        assert row["fastest_ratio"] == pytest.approx(fastest)
    before = {row["before"] for row in report["rows"] if row["op"] == "add_rms_norm_quant"}
    assert before == {"add, rms_norm, quantize", "add_rms_norm, quantize"}


@pytest.mark.parametrize("op", OPS)
def test_sequences_mean_what_the_fused_op_means(op: str) -> None:
    case = make_case(op, Inputs(make_device("sim"), torch.bfloat16, 192, 3))
    assert case.implementation == "reference"
    for sequence in case.sequences.values():
        for got, expected in zip(as_tensors(sequence()), as_tensors(case.reference()), strict=True):
            assert got.dtype == expected.dtype and torch.equal(got, expected)


def test_bytes_are_those_that_have_to_be_moved() -> None:
    inputs = Inputs(make_device("cpu"), torch.bfloat16, 192, 5)
    assert make_case("add_rms_norm", inputs).nbytes == 2 * (4 * 5 * 192 + 192)
    heads = 5 * (3 + 1) * 64  # of queries and keys; int64 positions; of the table cosines and sines of 5 rows
    assert make_case("split_qkv_rope", inputs).nbytes == 2 * 2 * heads + 8 * 5 + 4 * 5 * 64


def test_wrong_numbers_are_not_timed(
    run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_eps(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return op.reference(x, residual, weight, 0.1)

    op = ops.get("add_rms_norm")
    monkeypatch.setitem(op.implementations, "cpu", ops.Implementation("cpu", other_eps))
    report = run("--ops", "add_rms_norm", "--hidden", "64", "--tokens", "4", code=1)
    (row,) = report["rows"]
    assert report["wrong"] == 1 and "fused_us" not in row
    assert row["error"].startswith("add_rms_norm: result 0 is off by")


def test_an_op_that_does_not_do_its_work_is_suspicious(
    run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[int, tuple[Tensor, Tensor]] = {}

    def remembered(x: Tensor) -> tuple[Tensor, Tensor]:
        if x.data_ptr() not in kept:
            kept[x.data_ptr()] = op.reference(x)
        return kept[x.data_ptr()]

    op = ops.get("silu_mul_dynamic_quant")
    monkeypatch.setitem(op.implementations, "cpu", ops.Implementation("cpu", remembered))
    report = run("--ops", op.name, "--hidden", "4096", "--tokens", "256")
    assert report["suspicious"] == 1 and report["rows"][0]["limit_share"] > 1


def test_what_is_asked_for_wrongly_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, message in [
        (["--ops", "add_norm"], "ops='add_norm' is not allowed: one of add_rms_norm, "),
        (["--hidden", "64,x"], "hidden='64,x' is not allowed: positive integers"),
        (["--tokens", "0"], "tokens='0' is not allowed: positive integers"),
        (["--ops", "split_qkv_rope", "--hidden", "65"], "hidden=65 is not allowed: a multiple of 64"),
        (["--device", "none"], "device='none' is not allowed"),
    ]:
        assert main(["bench", "kernels", *QUICK, *flags]) == 2
        assert message in capsys.readouterr().err


def test_the_table_names_ops_and_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--ops", "silu_mul_quant", "--hidden", "64", "--tokens", "2", "--threads", "1"]
    assert main(["bench", "kernels", *QUICK[:-1], *flags]) == 0
    head, row, last, *_ = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["op", "hidden", "tokens"]
    assert row.startswith("silu_mul_quant") and row.endswith("silu_and_mul, quantize")
    assert last.endswith("on cpu, called one by one, 1 threads.")


def test_rounds_begin_with_another_one_each_time() -> None:
    order: list[int] = []

    def sample(number: int) -> Callable[[], float]:
        return lambda: float(order.append(number) or number)

    taken = alternate([sample(0), sample(1), sample(2)], 3)
    assert order == [0, 1, 2, 1, 2, 0, 2, 0, 1]
    assert taken == [[0.0] * 3, [1.0] * 3, [2.0] * 3]


class Work:
    """Takes so many seconds by a clock of its own, and ten times as many when it is cold."""

    def __init__(self, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds, self.time, self.calls, self.cold = seconds, 0.0, 0, True
        monkeypatch.setattr(kernel_timing, "now", lambda: self.time)

    def __call__(self) -> None:
        self.time += self.seconds * (10 if self.cold else 1)
        self.calls, self.cold = self.calls + 1, False


def test_a_sample_is_the_time_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(0.00025, monkeypatch)
    sample = Timer(make_device("cpu"), 0.002).sample(work)
    before = work.calls
    assert sample() == pytest.approx(0.00025)
    assert work.calls - before == 8 + 2, "as many as fill a sample, behind those that warm up"


def test_what_ran_before_a_sample_costs_it_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(0.002, monkeypatch)
    sample = Timer(make_device("cpu"), 0.004).sample(work)
    work.cold = True
    assert sample() == pytest.approx(0.002)


@pytest.mark.parametrize(
    ("change", "dtype", "word"),
    [
        (lambda x: x.clone(), torch.float32, None),
        (lambda x: x * (1 + 1e-6), torch.float32, None),
        (lambda x: x * (1 + 1e-4), torch.float32, "off by"),
        (lambda x: x.double(), torch.float32, "is torch.float64"),
        (lambda x: x[:2], torch.float32, "(2, 40)"),
        (lambda x: x.where(x != x.max(), torch.nan), torch.float32, "off by nan"),
    ],
)
def test_differences(change: Callable[[Tensor], Tensor], dtype: torch.dtype, word: str | None) -> None:
    expected = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    found = difference([change(expected)], [expected], dtype)
    assert (found is None) if word is None else (found is not None and word in found)


def test_differences_of_integers() -> None:
    expected = torch.randint(-100, 100, (10, 40), dtype=torch.int8)
    one, many, far = expected.clone(), expected + 1, expected.clone()
    one[0, 0] += 1
    far[0, 0] += 2
    assert difference([one], [expected], torch.float32) is None
    assert "100.0% of it" in str(difference([many], [expected], torch.float32))
    assert "up to 2" in str(difference([far], [expected], torch.float32))
    assert difference([], [expected], torch.float32) == "0 results, not 1"


def test_the_limit_of_small_buffers_is_at_least_that_of_large_ones() -> None:
    device = make_device("cpu")
    limit = CopyLimit(device, Timer(device, 0.0002))
    assert limit.rate(1) == limit.rate(2**16) >= limit.rate(2**20) == limit.rate(2**40) > 0
