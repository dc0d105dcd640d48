"""The device `npu` on the stand-in for torch_npu: graphs, updates of host arguments, memory, refusals."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from piecework import ops
from piecework.capture.options import CaptureOptions
from piecework.capture.plan import plan_captures
from piecework.capture.sizes import DECODE_SIZES, PREFILL_SIZES
from piecework.config import EngineConfig
from piecework.devices import make_device
from piecework.devices.npu import NpuDevice, NpuGraph
from piecework.errors import CaptureError, ConfigError, DeviceError
from piecework.models.config import ModelConfig
from piecework.ops.npu import vendor
from piecework.runner.batch import BatchItem, Span, build_inputs
from piecework.runner.recipe import make_recipe

PAGE, HEADS, DIM = 128, 2, 16
BATCH, PADDED = 2, 1


class Step:
    """A decode step of two sequences in three rows, on static buffers of the device."""

    def __init__(self, device: NpuDevice) -> None:
        generator = torch.Generator().manual_seed(0)

        def made(*shape: int) -> Tensor:
            return device.place(torch.randn(*shape, generator=generator).to(torch.bfloat16))

        rows = BATCH + PADDED
        self.q, self.k, self.v = made(rows, HEADS, DIM), made(rows, 1, DIM), made(rows, 1, DIM)
        self.out = device.zeros((rows, HEADS, DIM), torch.bfloat16)
        self.caches = made(4, 1, PAGE, DIM), made(4, 1, PAGE, DIM)
        self.table = device.place(torch.tensor([[1, 0], [2, 3], [0, 0]], dtype=torch.int32))
        self.slots = device.zeros((rows,), torch.int32)
        self.lengths = torch.ones(rows, dtype=torch.int32)
        self.starts = torch.arange(rows + 1, dtype=torch.int32)

    def run(self) -> None:
        index = (self.slots, self.table, self.starts, self.lengths)
        args = (self.q, self.k, self.v, self.out, *self.caches, *index, 1, 0.25, 0)
        ops.get("paged_attention").resolve(NpuDevice.op_order, *args).run(*args)

    def load(self, lengths: list[int]) -> dict[str, Tensor]:
        """Say how long the sequences are now; returns the host arguments."""
        page = [self.table[b, (n - 1) // PAGE] * PAGE + (n - 1) % PAGE for b, n in enumerate(lengths)]
        self.slots.copy_(torch.tensor([*map(int, page), 0], dtype=torch.int32))
        self.lengths.copy_(torch.tensor([*lengths, 0], dtype=torch.int32))
        return {"context_lengths": self.lengths, "query_starts": self.starts}

    def expected(self, lengths: list[int]) -> Tensor:
        caches = [cache.clone() for cache in self.caches]
        out = torch.zeros_like(self.out)
        ops.get("paged_attention").reference(
            self.q, self.k, self.v, out, *caches, self.slots[:BATCH], self.table[:BATCH],
            torch.arange(BATCH + 1), torch.tensor(lengths), 1, 0.25, 0,
        )  # fmt: skip
        return out


@pytest.fixture
def npu(twin: Any) -> NpuDevice:
    device = make_device("npu")
    assert isinstance(device, NpuDevice)
    return device


@pytest.fixture
def captured(npu: NpuDevice) -> tuple[Step, NpuGraph]:
    step = Step(npu)
    npu.warm_up(step.run)
    graph, _ = npu.capture(step.run, npu.new_pool())
    assert isinstance(graph, NpuGraph)
    return step, graph


def test_lengths_are_updated_before_each_replay(captured: tuple[Step, NpuGraph]) -> None:
    step, graph = captured
    for lengths in ([3, 200], [128, 129], [1, 256]):
        values = step.load(lengths)
        wanted = step.expected(lengths)
        graph.update(values).join()
        graph.replay()
        torch.testing.assert_close(step.out[:BATCH], wanted[:BATCH], atol=2e-2, rtol=2e-2)
        assert not step.out[BATCH:].any(), "padded rows are zero, whatever attention says there"


def test_a_length_that_is_not_updated_is_caught(captured: tuple[Step, NpuGraph]) -> None:
    step, graph = captured
    with pytest.raises(CaptureError, match=r"host arguments \(context_lengths\) were not updated"):
        graph.replay()
    values = step.load([3, 200])
    update = graph.update(values)
    with pytest.raises(CaptureError, match="were not updated"):
        graph.replay()
    update.join()
    graph.replay()
    with pytest.raises(CaptureError, match="were not updated"):
        graph.replay()
    # Without the device class's own check the stream would wait for ever.
    with pytest.raises(RuntimeError, match="the stream hangs"):
        graph._graph.replay()


def test_an_update_waits_for_the_replay_before(
    captured: tuple[Step, NpuGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may still read the lengths that are replaced."""
    step, graph = captured
    order: list[str] = []
    update = graph._graph.update

    def noted(**arguments: Any) -> None:
        order.append("update")
        update(**arguments)

    stream = sys.modules["torch_npu.npu"].current_stream()
    monkeypatch.setattr(stream, "synchronize", lambda: order.append("wait"))
    monkeypatch.setattr(graph._graph, "update", noted)
    for lengths in ([3, 200], [4, 201]):
        graph.update(step.load(lengths)).join()
        graph.replay()
    assert order == ["wait", "update"] * 2


def test_streams_are_those_of_its_own_npu(
    captured: tuple[Step, NpuGraph], npu: NpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that didn't make the device has the first NPU as its current one."""
    step, graph = captured
    package = sys.modules["torch_npu.npu"]
    asked: list[Any] = []
    current = package.current_stream

    def noted(device: Any = None) -> Any:
        asked.append(device)
        return current(device)

    monkeypatch.setattr(package, "current_stream", noted)
    npu.warm_up(step.run)
    graph.update(step.load([3, 200])).join()
    assert asked == [0, 0]


def test_what_cannot_be_updated_is_refused(captured: tuple[Step, NpuGraph], npu: NpuDevice) -> None:
    step, graph = captured
    with pytest.raises(
        CaptureError, match="slots is no host argument of this graph; it has: context_lengths"
    ):
        graph.update({"slots": step.slots})
    with pytest.raises(CaptureError, match="context_lengths must be on the host"):
        graph.update({"context_lengths": torch.empty(3, device="meta")})
    x = npu.zeros((4,), torch.float32)
    plain, y = npu.capture(lambda: x + 1, npu.new_pool())
    with pytest.raises(CaptureError, match="query_starts is no host argument of this graph; it has: none"):
        plain.update(step.load([1, 1]))
    x.fill_(2)
    plain.replay()
    assert npu.weak_reference(y).tolist() == [3.0] * 4
    plain.release()
    plain.release()
    for call in (plain.replay, lambda: plain.update({})):
        with pytest.raises(CaptureError, match="a released graph can't be"):
            call()


def test_a_capture_that_waits_for_the_device_is_refused(npu: NpuDevice) -> None:
    x = npu.zeros((4,), torch.float32)
    with pytest.raises(CaptureError, match="item waits for a value of the device"):
        npu.capture(lambda: x.sum().item(), npu.new_pool())
    with pytest.raises(CaptureError, match="the NPU capture failed: the device is waited for"):
        npu.capture(npu.synchronize, npu.new_pool())
    with pytest.raises(CaptureError, match="the NPU capture failed: a buffer is allocated"):
        npu.capture(lambda: npu.zeros((1,), torch.float32), npu.new_pool())
    graph, y = npu.capture(lambda: x + 1, npu.new_pool())
    graph.replay()
    assert y.tolist() == [1.0] * 4


def test_graphs_of_a_pool_share_memory(npu: NpuDevice, twin: Any) -> None:
    x, pool = npu.zeros((1 << 14,), torch.float32), npu.new_pool()

    def work() -> None:
        npu.weak_reference(x + 1)

    first, _ = npu.capture(work, pool)
    reserved = pool.reserved
    second, _ = npu.capture(work, pool)
    assert pool.reserved == reserved and twin.graphs == 2
    first.release()
    second.release()
    assert twin.graphs == 0


def test_no_more_graphs_than_there_is_room_for(npu: NpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piecework.devices.npu.GRAPH_BUDGET", 2)
    x, pool = npu.zeros((1,), torch.float32), npu.new_pool()
    graphs = [npu.capture(lambda: x + 1, pool)[0] for _ in range(2)]
    with pytest.raises(DeviceError, match="no room for more than 2 graphs"):
        npu.capture(lambda: x + 1, pool)
    graphs[0].release()
    npu.capture(lambda: x + 1, pool)


@pytest.mark.parametrize("layers", [30, 64])
@pytest.mark.parametrize("decode", ["full", "piecewise"])
def test_default_sizes_fit_the_budget(layers: int, decode: str, npu: NpuDevice) -> None:
    pieces = layers + 1
    wanted = CaptureOptions(decode, "piecewise", DECODE_SIZES, PREFILL_SIZES)  # type: ignore[arg-type]
    plan = plan_captures(wanted.wishes(pieces), graph_budget=npu.graph_budget)
    counted = len(plan.sizes["piecewise"]) * pieces + sum(
        len(plan.sizes.get(n, ())) for n in ("full", "head")
    )
    assert plan.graphs == counted <= 1800
    asked = sum(len(wish.sizes) * wish.graphs_per_size for wish in wanted.wishes(pieces))
    assert bool(plan.dropped) == (asked > 1800)
    assert all("room for 1800 graphs" in drop.reason for drop in plan.dropped)
    assert max(plan.sizes["piecewise"]) == 4096
    if decode == "full":
        assert plan.sizes["full"] == DECODE_SIZES


def test_tensors_lie_in_the_device_and_lengths_on_the_host(npu: NpuDevice, twin: Any) -> None:
    tensor = torch.randn(3, 4).t()
    placed = npu.place(tensor)
    assert twin.memory.holds(placed) and torch.equal(placed, tensor)
    assert npu.place(placed) is placed
    items = [BatchItem([5], Span(130, 1), [1, 2]), BatchItem([6], Span(0, 1), [3])]
    found = build_inputs(items, PAGE, npu)
    on_device = (found.input_ids, found.positions, found.metadata.slots, found.metadata.page_table)
    assert all(twin.memory.holds(t) for t in on_device)
    assert not any(
        twin.memory.holds(t) for t in (found.metadata.query_starts, found.metadata.context_lengths)
    )
    assert found.metadata.slots.dtype == torch.int32 and found.metadata.slots.tolist() == [
        2 * PAGE + 2,
        3 * PAGE,
    ]
    free = npu.free_memory()
    kept = npu.zeros((1000,), torch.float32)
    assert free - npu.free_memory() >= kept.nbytes
    assert npu.default_kv_cache_memory(1000) == 800


def test_names_and_precisions(npu: NpuDevice) -> None:
    assert npu.default_dtype() == torch.bfloat16 and not npu.supports_dtype(torch.float64)
    release = ".".join(torch.__version__.split(".")[:2])
    assert npu.fingerprint() == f"twin, torch_npu {release}.twin, torch"
    assert npu.graph_modes("decode") == ("full", "piecewise", "eager")
    with pytest.raises(ConfigError, match="device='npu:1' is not allowed: npu:0 to npu:0"):
        make_device("npu:1")
    with pytest.raises(ConfigError, match="device='npu:x' is not allowed: npu or npu:<number>"):
        make_device("npu:x")


def test_without_torch_npu_the_device_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="'npu' is not allowed: a machine with an Ascend NPU and torch_npu, w"
    ):
        make_device("npu")


@pytest.mark.parametrize("release", ["2.6.0.post3", "20.13.0", "0"])
def test_another_release_of_torch_npu_is_refused(
    release: str, twin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["torch_npu"], "__version__", release)
    with pytest.raises(ConfigError) as refused:
        make_device("npu")
    assert f"the release for torch {torch.__version__}; {release} is installed" in str(refused.value)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ImportError('libhccl.so: cannot\\nopen')", "can't be imported: libhccl.so: cannot open"),
        ("raise RuntimeError", "can't be imported: RuntimeError"),
        ("import no_such_vendor", "can't be imported: No module named 'no_such_vendor'"),
    ],
)
def test_what_torch_npu_says_at_its_import_is_told(
    source: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch_npu.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(vendor, "_installed", lambda name: True)
    with pytest.raises(
        ConfigError, match=r"^device='npu' is not allowed: a machine with an Ascend NPU"
    ) as refused:
        make_device("npu")
    assert refused.value.allowed.endswith(reason)


MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "rope_theta": 10000.0,
}


@pytest.mark.parametrize(
    ("dtype", "page_size", "kernel"),
    [(torch.bfloat16, 128, True), (torch.bfloat16, 16, False), (torch.float32, 128, False)],
)
def test_a_full_graph_needs_a_kernel_for_attention(
    dtype: torch.dtype, page_size: int, kernel: bool, npu: NpuDevice, caplog: pytest.LogCaptureFixture
) -> None:
    def decode(**settings: Any) -> str:
        config = EngineConfig.from_flat({"page_size": page_size, "compilation_config": settings})
        return make_recipe(config, npu, ModelConfig.from_dict(MODEL), dtype, 256).capture.decode

    assert decode(decode_graph="piecewise") == "piecewise"
    if kernel:
        assert decode() == decode(decode_graph="full") == "full"
        return
    assert decode() == "piecewise"
    assert f"the device npu has no kernel for attention in {dtype} over pages of {page_size}" in caplog.text
    with pytest.raises(ConfigError, match="decode_graph='full' is not allowed: piecewise or eager, since"):
        decode(decode_graph="full")
