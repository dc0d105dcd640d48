"""Mistakes that corrupt results silently on an accelerator, planted here, must be caught.

`tools/mutants` removes the defences one by one and looks that the test named in the patch fails.
"""

from __future__ import annotations

import pytest
import torch
from capture_rig import FULL, PIECEWISE, Rig, prompt, tiny
from torch import Tensor, nn

from piecework.capture.buffers import StaticBuffers
from piecework.capture.capture import CapturedProgram
from piecework.capture.options import CaptureOptions
from piecework.compilation import CompilationConfig
from piecework.config import EngineConfig
from piecework.devices import make_device
from piecework.devices.sim import SimDevice
from piecework.errors import CaptureError, ConfigError
from piecework.graph.build import Options, build
from piecework.graph.counters import Counters
from piecework.kvcache import AttentionMetadata, LayerShape, PagedKVCache
from piecework.layers.attention import AttentionSpec
from piecework.runner.attention import PagedAttention
from piecework.runner.memory import make_cache

_library = torch.library.Library("capture_test", "DEF")
_library.define("per_tensor(Tensor x) -> Tensor")
_library.define("doubled(Tensor x) -> Tensor")
_library.impl("per_tensor", lambda x: x + 0 * x.abs().amax(), "CPU")
_library.impl("doubled", lambda x: x * 2, "CPU")
torch.library.register_fake("capture_test::per_tensor", torch.empty_like, lib=_library)
torch.library.register_fake("capture_test::doubled", torch.empty_like, lib=_library)


def metadata(*values: list[int] | list[list[int]]) -> AttentionMetadata:
    """Slots, page table, query starts and context lengths as tensors."""
    return AttentionMetadata(*(torch.tensor(value, dtype=torch.int32) for value in values), 1)


@pytest.fixture
def sim() -> SimDevice:
    return SimDevice(capacity=1 << 24)


def test_a_padded_row_does_not_write_into_a_live_request():
    rig = Rig(options=FULL).capture()
    for sequence in range(4):
        rig.check(rig.item(sequence, prompt(3, sequence)))
    rig.check(*[rig.item(s, [7 + s]) for s in range(4)])
    rig.finish(3)
    newcomer = rig.item(9, prompt(4, 9))
    assert newcomer.pages == (pages := rig.pages_of[9]) and pages, "it has the pages that sequence 3 had"
    rig.check(newcomer)
    rig.check(rig.item(10, prompt(4, 10)))
    # Three rows in a graph of four: the fourth row's slot was on what is now the newcomer's page.
    rig.check(*[rig.item(s, [20 + s]) for s in range(3)])
    rig.check(rig.item(9, [5]))


def test_every_tail_is_reset_at_every_load(sim):
    buffers = StaticBuffers(sim, tokens=4, sequences=4, table_width=3)

    long = torch.tensor([5, 6, 7, 8])
    buffers.load(long, long, 4)
    table = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 1, 1]]
    buffers.load_metadata(metadata([9, 10, 11, 12], table, [0, 1, 2, 3, 4], [9, 9, 9, 9]), 4)
    buffers.load(torch.tensor([3]), torch.tensor([2]), 4)
    buffers.load_metadata(metadata([8], [[2]], [0, 1], [3]), 4)
    found = {name: tensor.tolist() for name, tensor in buffers.tensors().items()}
    assert found == {
        "input_ids": [3, 0, 0, 0],
        "positions": [2, 0, 0, 0],
        "num_valid_rows": [1],
        "slots": [8, 0, 0, 0],
        "page_table": [[2, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]],
        "query_starts": [0, 1, 1, 1, 1],
        "context_lengths": [3, 0, 0, 0],
    }
    assert all(sim.memory.holds(t) for t in buffers.tensors().values())
    assert buffers.slots.dtype is torch.int32, "an NPU takes no others"


def test_lengths_are_on_the_host_where_graphs_take_them_from_there():
    host = make_device("sim:host")
    buffers = StaticBuffers(host, tokens=4, sequences=4, table_width=3)
    on_device = {name for name, tensor in buffers.tensors().items() if host.memory.holds(tensor)}
    assert set(buffers.tensors()) - on_device == {"query_starts", "context_lengths"}
    assert set(buffers.host_arguments(2)) == {"query_starts", "context_lengths"}


class Around(nn.Module):
    """A piece, the test's hole, and another piece."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[2.0, 1.0], [0.5, -1.0]]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.weight
        return torch.ops.capture_test.doubled(h + 1) @ self.weight + h


def captured(model: nn.Module, sim: SimDevice, splitting: str, x: Tensor) -> CapturedProgram:
    sim.prepare_weights(model)
    config = CompilationConfig(compiler="eager", splitting_ops=(splitting,))
    program = build(model, ["x"], [torch.zeros(3, *x.shape[1:], dtype=x.dtype)], Options(sim, config))
    found = CapturedProgram(program, sim, "piecewise", sim.new_pool(), Counters())
    return found


@torch.inference_mode()
def test_what_a_hole_returns_reaches_the_piece_behind_it(sim):
    model, x = Around(), sim.place(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    program = captured(model, sim, "capture_test::doubled", x)
    assert program.program.num_pieces == 2
    program.capture(2, [x], {})
    for seed in range(3):
        x.copy_(torch.randn(2, 2, generator=torch.Generator().manual_seed(seed)))
        (result,) = program.replay(2, [x], {})
        torch.testing.assert_close(result, model(x))


@torch.inference_mode()
def test_a_tensor_keeps_its_memory_across_a_hole(sim):
    model, x = Around(), sim.place(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    seen: list[Tensor] = []

    def hole(y: Tensor) -> Tensor:
        seen.append(y.clone())
        return y * 2

    program = captured(model, sim, "capture_test::doubled", x)
    program.capture(2, [x], {"capture_test::doubled": hole})
    seen.clear()
    x.mul_(3)
    (result,) = program.replay(2, [x], {"capture_test::doubled": hole})
    torch.testing.assert_close(seen, [x @ model.weight + 1])
    torch.testing.assert_close(result, model(x))


class Noting(SimDevice):
    """Notes what is asked of it."""

    def __init__(self) -> None:
        super().__init__(capacity=1 << 24)
        self.asked: list[str] = []

    def warm_up(self, fn):
        self.asked.append("warm up")
        return super().warm_up(fn)

    def capture(self, fn, pool):
        self.asked.append("capture")
        return super().capture(fn, pool)


@torch.inference_mode()
def test_every_size_is_warmed_up_before_it_is_captured():
    device = Noting()
    x = device.zeros((4, 2), torch.float32)
    program = captured(Around(), device, "capture_test::doubled", x)
    for size in (4, 2):
        program.capture(size, [x[:size]], {})
    assert device.asked == ["warm up", "capture", "capture"] * 2


@torch.inference_mode()
def test_a_smaller_size_uses_the_memory_of_a_larger_one(sim):
    x = sim.zeros((8192, 2), torch.float32)
    program = captured(Around(), sim, "capture_test::doubled", x)
    program.capture(8192, [x], {})
    before = sim.free_memory()
    program.capture(8176, [x[:8176]], {})
    assert before - sim.free_memory() < 8176 * 2 * 4, "less than one of its tensors: the two graphs alone"
    x.copy_(torch.randn(8192, 2, generator=torch.Generator().manual_seed(0)))
    for size in (8176, 8192):
        (result,) = program.replay(size, [x[:size]], {})
        torch.testing.assert_close(result, Around()(x[:size].clone()))


@torch.inference_mode()
def test_a_result_stays_while_other_graphs_of_the_pool_run(sim):
    x, y = sim.zeros((4, 2), torch.float32), sim.zeros((4, 2), torch.float32)
    first, second = (captured(Around(), sim, "capture_test::doubled", x) for _ in range(2))
    second.pool = first.pool
    first.capture(4, [x], {})
    second.capture(4, [y], {})
    x.fill_(1)
    (result,) = first.replay(4, [x], {})
    second.replay(4, [y], {})
    torch.testing.assert_close(result, Around()(torch.ones(4, 2)))


def test_memory_that_graphs_will_take_is_not_the_caches(sim):
    model = tiny("llama", sim)
    config = EngineConfig.from_flat({"num_pages": 8, "page_size": 4})
    free = sim.free_memory()
    with pytest.raises(ConfigError, match="at most the 1000 bytes that are free on sim"):
        make_cache(model, config, 16, torch.float32, sim, free - 1000)
    assert make_cache(model, config, 16, torch.float32, sim, 1000).num_pages == 8


@pytest.mark.parametrize("options", [FULL, PIECEWISE], ids=["full", "piecewise"])
def test_a_buffer_that_is_reallocated_is_named(options):
    rig = Rig(options=options).capture()
    rig.check(rig.item(0, prompt(3)))
    rig.check(rig.item(0, [4]))
    first, second, *rest = rig.cache.values
    rig.cache.values = (first, rig.device.zeros(tuple(second.shape), torch.float32), *rest)
    with pytest.raises(CaptureError, match=r"values\.1 moved after capture"):
        rig.run(rig.item(0, [5]))


def test_a_static_buffer_that_is_reallocated_is_named():
    rig = Rig(options=PIECEWISE).capture()
    rig.check(rig.item(0, prompt(3)))
    rig.buffers.positions = rig.device.zeros((8,), torch.int64)
    with pytest.raises(CaptureError, match="positions moved after capture"):
        rig.run(rig.item(0, [4]))


@pytest.mark.parametrize("options", [FULL, PIECEWISE], ids=["full", "piecewise"])
def test_a_weight_that_moved_before_the_first_replay_is_named(options):
    rig = Rig(options=options).capture()
    weight = rig.model.model.layers[1].self_attn.o_proj.weight
    weight.data = rig.device.memory.empty_like(weight).copy_(weight)
    with pytest.raises(CaptureError, match=r"model\.layers\.1\.self_attn\.o_proj\.weight moved"):
        rig.run(rig.item(0, [5]))


def test_debug_mode_looks_at_weights_at_every_replay():
    rigs = [Rig(options=FULL, debug=debug).capture() for debug in (False, True)]
    for rig in rigs:
        rig.check(rig.item(0, [5]))
        weight = rig.model.model.norm.weight
        weight.data = rig.device.memory.empty_like(weight).copy_(weight)
    rigs[0].run(rigs[0].item(0, [5]))
    with pytest.raises(CaptureError, match=r"model\.norm\.weight moved"):
        rigs[1].run(rigs[1].item(0, [5]))


class PerTensor(nn.Module):
    """Attention, then a reduction over all rows, padded ones too, as a dynamic quantiser does it."""

    spec = AttentionSpec(layer=0, num_heads=1, num_kv_heads=1, head_dim=4, scale=0.5, window=0)

    def forward(self, x: Tensor) -> Tensor:
        q = (x * 2).view(-1, 1, 4)
        out = torch.empty_like(q)
        torch.ops.piecework.attention(q, q + 1, q - 1, out, 0, self.spec.scale, 0)
        return torch.ops.capture_test.per_tensor(out.view(-1, 4))


@pytest.mark.parametrize("mode", ["full", "piecewise"])
@torch.inference_mode()
def test_nan_of_padded_rows_reaches_no_reduction(sim, mode):
    x = sim.zeros((4, 4), torch.float32)
    program = captured(PerTensor(), sim, "piecework::attention", x)
    program.mode = mode
    cache = PagedKVCache([LayerShape(1, 4)], 4, 4, torch.float32, sim)
    attend = PagedAttention([PerTensor.spec], cache, sim.op_order)
    buffers = StaticBuffers(sim, tokens=4, sequences=4, table_width=1)
    batch = metadata([4, 8], [[1], [2]], [0, 1, 2], [1, 1])
    buffers.load_metadata(batch, 4)
    seen = buffers.metadata(4) if mode == "full" else batch
    holes = program.program.holes(lambda *args: attend(*args, seen))
    program.capture(4, [x], holes)
    x[:2] = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    (result,) = program.replay(4, [x], holes)
    torch.testing.assert_close(result[:2], x[:2] * 2 - 1)  # one token sees its own value


def test_sizes_beyond_the_graph_budget_are_not_captured():
    sizes = tuple(range(1, 13))
    device = SimDevice(capacity=1 << 26, graph_budget=22)
    rig = Rig(device=device, options=CaptureOptions("piecewise", "eager", sizes))
    plan = rig.runner.plan()
    rig.runner.capture(plan)
    assert device.graphs == plan.graphs <= 22
    kept = plan.sizes["piecewise"]
    assert 12 in kept and len(kept) + len([d for d in plan.dropped if d.name == "piecewise"]) == 12
    assert {d.reason for d in plan.dropped} == {"the device has room for 22 graphs"}
    rig.check(*[rig.item(s, prompt(1, s)) for s in range(11)])
    assert rig.counters.eager_runs == 0 and rig.counters.padded_tokens > 0


def test_host_lengths_are_updated_before_every_replay():
    rig = Rig(device=make_device("sim:host"), options=FULL).capture()
    rig.check(rig.item(0, prompt(3)))
    for token in (4, 5, 6):
        rig.check(rig.item(0, [token]))
    assert rig.counters.replays >= 3


def test_lengths_on_the_device_take_no_update():
    rig = Rig(options=FULL).capture()
    (graph,) = rig.runner.full._entries[1].graphs
    with pytest.raises(CaptureError, match="context_lengths is no host argument of this graph; it has: none"):
        graph.update({"context_lengths": torch.ones(1, dtype=torch.int32)})
