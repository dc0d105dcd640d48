"""Captured programs give what the eager model gives, whatever the size, and count what they did."""

from __future__ import annotations

import gc
import random
import sys

import pytest
import torch
from capture_rig import EAGER, FULL, PAGE, PIECEWISE, Rig, prompt
from torch import nn

from piecework.capture.options import CaptureOptions
from piecework.devices import make_device
from piecework.devices.sim import Fault, SimDevice
from piecework.errors import CaptureError, DeviceError
from piecework.runner.batch import build_inputs

MODES = {"full": FULL, "piecewise": PIECEWISE, "eager": EAGER}


def generate(rig: Rig, batch: int, steps: int) -> None:
    """Prefill `batch` prompts of different lengths together, then decode greedily."""
    items = [rig.item(s, prompt(2 + s, s)) for s in range(batch)]
    logits = rig.check(*items)
    for _ in range(steps):
        logits = rig.check(*[rig.item(s, [int(logits[s].argmax())]) for s in range(batch)])


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("qwen3", "full"),
        ("qwen3_moe", "full"),
        ("llama", "piecewise"),
        ("qwen3_moe", "piecewise"),
        ("qwen3", "eager"),
    ],
)
def test_every_mode_equals_the_eager_model(kind, mode):
    rig = Rig(kind, options=MODES[mode]).capture()
    for batch in (1, 2, 3, 4, 5):  # captured, between captured ones, above the largest for decode
        generate(rig, batch, 3)
        for sequence in range(batch):
            rig.finish(sequence)
    counters = rig.counters
    assert (counters.captures > 0) == (counters.replays > 0) == (mode != "eager")
    assert counters.eager_runs > 0 and counters.recompiles == 0


@pytest.mark.parametrize(("kind", "options"), [("llama", PIECEWISE), ("qwen3_moe", FULL)])
def test_opaque_pieces(kind, options):
    rig = Rig(kind, options=options, opaque=True).capture()
    generate(rig, 3, 3)
    names = [graph.operations for entry in rig.runner.pieces._entries.values() for graph in entry.graphs]
    last = ["opaque piece", "aten::copy_"]  # into the static result
    assert names == [["opaque piece"], ["opaque piece"], last] * len(rig.runner.pieces.sizes)


@pytest.mark.slow
@pytest.mark.parametrize("options", [FULL, PIECEWISE], ids=["full", "piecewise"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_pieces_of_inductor(kind, options):
    rig = Rig(kind, options=options, compiler="inductor").capture()
    generate(rig, 3, 3)
    assert all(piece.compiler == "inductor" for piece in rig.program.pieces)
    assert rig.counters.compiles == 3 and rig.counters.recompiles == 0 and rig.counters.replays > 0


class Launching(SimDevice):
    """Runs what a GPU runs where it has no kernels of its own, operation by operation."""

    op_order = ("cuda", "reference")


@pytest.mark.parametrize(("kind", "options"), [("qwen3_moe", FULL), ("qwen3", PIECEWISE)])
def test_the_operations_of_a_gpu_can_be_captured(kind, options):
    rig = Rig(kind, device=Launching(capacity=1 << 26), options=options).capture()
    generate(rig, 3, 4)
    entries = rig.runner.full._entries if options is FULL else rig.runner.pieces._entries
    names = {name for graph in entries[4].graphs for name in graph.operations}
    assert not any(name.startswith("piecework") for name in names)
    assert "aten::linear" in names and ("aten::scaled_dot_product_attention" in names) == (options is FULL)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_cuda_equals_the_eager_model(mode):
    cuda = make_device("cuda")
    if MODES[mode].decode not in cuda.graph_modes("decode"):
        pytest.skip("no paged attention that reads lengths on the device")
    rig = Rig("qwen3", device=cuda, options=MODES[mode]).capture()
    generate(rig, 3, 5)
    assert (rig.counters.replays > 0) == (mode != "eager")


def test_counts_of_captures_replays_and_padding():
    layers = 4
    deep = {"num_hidden_layers": layers}
    rig = Rig(options=CaptureOptions("piecewise", "eager", (1, 2, 4, 8)), overrides=deep)
    made = rig.capture().runner.pieces
    counters, head = rig.counters, rig.head_counters
    assert rig.program.num_pieces == layers + 1 and rig.program.num_holes == layers
    assert made.sizes == (1, 2, 4, 8) and made.graphs_per_size == layers + 1
    assert counters.captures == 4 * (layers + 1) and head.captures == 4
    assert rig.device.graphs == 4 * (layers + 1) + 4
    rig.check(*[rig.item(s, prompt(1, s)) for s in range(3)])
    assert (counters.replays, counters.padded_tokens, counters.eager_runs) == (layers + 1, 1, 0)
    assert (head.replays, head.padded_tokens) == (1, 1)
    rig.runner.release()
    assert rig.device.graphs == 0

    rig = Rig(options=CaptureOptions("full", "eager", (1, 2, 4)), overrides=deep)
    rig.capture()
    assert rig.counters.captures == 3 == rig.device.graphs and rig.head_counters.captures == 0
    rig.check(*[rig.item(s, prompt(1, s)) for s in range(4)])
    assert (rig.counters.replays, rig.counters.padded_tokens, rig.head_counters.eager_runs) == (1, 0, 0)


@pytest.mark.parametrize(
    ("options", "steps"),
    [pytest.param(FULL, 200, marks=pytest.mark.slow), (PIECEWISE, 60)],
    ids=["full", "piecewise"],
)
def test_steps_of_random_batches_make_nothing_new(options, steps):
    rig = Rig(options=options, pages=128).capture()
    dice = random.Random(1)
    made = rig.counters.captures, rig.head_counters.captures
    live: list[int] = []
    for step in range(steps):
        if len(live) < 6 and (not live or dice.random() < 0.3):
            live.append(step)
            rig.check(rig.item(step, prompt(dice.randrange(1, 8), step)), phase="prefill")
            continue
        chosen = dice.sample(live, dice.randrange(1, len(live) + 1))
        rig.check(*[rig.item(s, prompt(1, s + step)) for s in chosen])
        for sequence in [s for s in live if len(rig.tokens_of[s]) > 30 or dice.random() < 0.05]:
            live.remove(sequence)
            rig.finish(sequence)
    assert (rig.counters.captures, rig.head_counters.captures) == made
    assert rig.counters.recompiles == 0 and rig.counters.compiles == 3
    assert rig.counters.replays > steps // 2 and rig.counters.padded_tokens > 0


@pytest.mark.parametrize("options", [FULL, PIECEWISE], ids=["full", "piecewise"])
def test_a_replay_enters_neither_modules_nor_pieces(options):
    rig = Rig(options=options).capture()
    rig.check(rig.item(0, prompt(3)))
    item = rig.item(0, [5])
    entered: list[str] = []
    hook = nn.modules.module.register_module_forward_pre_hook(lambda *_: entered.append("module"))

    def watch(frame, event, _):
        if event == "call" and frame.f_code.co_name in ("forward", "piece"):
            entered.append(frame.f_code.co_name)

    sys.setprofile(watch)
    try:
        rig.run(item)
    finally:
        sys.setprofile(None)
        hook.remove()
    assert entered == []
    rig.runner.options = EAGER
    sys.setprofile(watch)
    rig.run(rig.item(0, [6]))
    sys.setprofile(None)
    assert "piece" in entered, "the watch sees a piece that is entered"


def test_attributes_changed_after_capture_change_nothing():
    rig = Rig().capture()
    rig.check(rig.item(0, prompt(3)))
    for layer in rig.model.model.layers:
        layer.input_layernorm.eps = 100.0
        layer.self_attn.spec = None
    rig.check(rig.item(0, [5]))


def test_host_side_lengths():
    rig = Rig("qwen3", device=make_device("sim:host")).capture()
    generate(rig, 3, 5)
    assert rig.counters.captures == 3 + 2 * 3


def test_logits_of_chosen_rows_only():
    rig = Rig().capture()
    items = [rig.item(s, prompt(1, s)) for s in range(3)]
    every = rig.check(*items)
    inputs = build_inputs(items, PAGE, rig.device)
    step = (inputs.input_ids, inputs.positions, inputs.metadata)
    hidden, logits = rig.runner.run("decode", *step, [2, 0])
    torch.testing.assert_close(logits, every[[2, 0]])
    hidden, logits = rig.runner.run("decode", *step)
    assert logits is None and hidden.shape == (3, 32)


def test_a_size_that_was_not_captured_is_said_once_and_refused_when_strict(caplog):
    rig = Rig(options=CaptureOptions("full", "eager", (1, 2)), pages=64).capture()
    for _ in range(2):
        rig.check(*[rig.item(s, prompt(1, s)) for s in range(3)])
    said = [
        r.getMessage() for r in caplog.records if r.name == "piecework.capture" and r.levelname == "WARNING"
    ]
    assert said == ["decode of 3 rows runs without a graph; the largest captured size is 2"]
    assert rig.counters.eager_runs == 2
    rig.runner._strict = True
    with pytest.raises(CaptureError, match="decode of 3 rows runs without a graph"):
        rig.run(*[rig.item(s, prompt(1, s)) for s in range(3)])


def test_without_padding_only_batches_of_a_captured_size_are_graphs(caplog):
    rig = Rig(options=CaptureOptions("full", "eager", (1, 2, 4), decode_padding=False)).capture()
    for batch in (1, 2, 3, 4):
        rig.check(*[rig.item(s, [s + batch]) for s in range(batch)])
        assert rig.counters.eager_runs == (batch >= 3), "three rows don't run as four"
    assert rig.counters.replays == 3 and rig.counters.padded_tokens == 0
    said = "decode of 3 rows runs without a graph; none was captured at this size, and decode_padding is off"
    assert caplog.text.count(said) == 1
    strict = Rig(options=rig.options, strict=True).capture()
    with pytest.raises(CaptureError, match=said):
        strict.run(*[strict.item(s, [1]) for s in range(3)])


class Watching(SimDevice):
    """Notes whether the garbage collector runs during a capture."""

    def __init__(self) -> None:
        super().__init__(capacity=1 << 26)
        self.collecting: list[bool] = []

    def capture(self, fn, pool):
        self.collecting.append(gc.isenabled())
        return super().capture(fn, pool)


def test_the_collector_rests_during_capture():
    device, frozen = Watching(), gc.get_freeze_count()
    Rig(device=device).capture()
    assert device.collecting and not any(device.collecting)
    assert gc.isenabled() and gc.get_freeze_count() == frozen


def test_a_model_that_cannot_be_traced_runs_eagerly(caplog):
    class Nosy(nn.Module):
        """Decides by values."""

        def forward(self, x):
            return x * 2 if bool(x.sum() > 0) else x

    rig = Rig()
    rig.model.model.norm = nn.Sequential(rig.model.model.norm, Nosy())
    rig.eager.model.model.norm = nn.Sequential(rig.eager.model.model.norm, Nosy())
    rig.build()
    assert rig.program.opaque_reason and rig.runner.wishes == []
    rig.capture()
    generate(rig, 3, 3)
    assert rig.counters.captures == rig.counters.replays == 0 and rig.counters.eager_runs == 4


class Shifted(nn.Module):
    """Has a constant that is neither a parameter nor a buffer."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.shift = torch.full((32,), 0.25)

    def forward(self, x):
        return self.inner(x) + self.shift


def test_constants_of_the_model_are_in_the_memory_that_graphs_read():
    rig = Rig(options=PIECEWISE)
    for model in (rig.model, rig.eager.model):
        model.model.norm = Shifted(model.model.norm)
    rig.build().capture()
    generate(rig, 2, 2)
    assert rig.counters.replays > 0


def test_planned_faults_reach_the_runner():
    rig = Rig(device=SimDevice(capacity=1 << 26, faults=[Fault("step", 1), Fault("step", 2, "nan")]))
    rig.capture()
    rig.check(rig.item(0, prompt(3)))
    with pytest.raises(DeviceError, match="step 1"):
        rig.run(rig.item(0, [3]))
    _, logits = rig.run(rig.item(1, [3]))
    assert bool(logits.isnan().all())
    rig = Rig(device=SimDevice(capacity=1 << 26, faults=[Fault("capture", 2)]))
    with pytest.raises(DeviceError, match="capture 2"):
        rig.capture()
    assert gc.isenabled()
