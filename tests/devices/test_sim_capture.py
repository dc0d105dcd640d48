"""sim is honest: only recorded operations on recorded addresses run, and mistakes show."""

from __future__ import annotations

import sys

import pytest
import torch
from rss import run_measured
from torch import nn

from piecework.devices import make_device
from piecework.devices.sim import SimDevice
from piecework.errors import CaptureError, DeviceError


class Opaque:
    """A piece that computes with numpy, behind torch's back, as generated code does."""

    opaque = True

    def __call__(self, inputs, outputs=None):
        x, y = (torch.from_numpy(t.numpy().copy()) for t in inputs)
        return [x + y, x * y]


@pytest.fixture
def sim():
    return SimDevice(capacity=1 << 24)


def placed(sim, *values):
    return [sim.place(torch.tensor(value)) for value in values]


def test_a_replay_computes_what_was_recorded_on_new_values(sim):
    x, w = placed(sim, [[1.0, 2.0], [3.0, 4.0]], [[0.5, 0.0], [1.0, -1.0]])

    def work():
        a, b = torch.nn.functional.linear(x, w).split(1, -1)
        c = torch.where(a > b, a, 0.0).masked_fill(b > 3, -1.0)
        return torch.cat([c, b * 2.0], -1), torch.arange(2, dtype=torch.float32)[None] + x

    expected = work()
    graph, captured = sim.capture(work, sim.new_pool())
    torch.testing.assert_close(captured, expected)
    for seed in range(3):
        x.copy_(torch.randn(2, 2, generator=torch.Generator().manual_seed(seed)))
        expected = work()
        graph.replay()
        torch.testing.assert_close(captured, expected, rtol=0, atol=0)


def test_writes_into_arguments_are_recorded(sim):
    x, total = placed(sim, [1.0, 2.0], [0.0, 0.0])

    def work():
        total.add_(x)
        torch.mul(total, 2.0, out=x)
        x[1:].fill_(7.0)

    graph, _ = sim.capture(work, sim.new_pool())
    x.copy_(torch.tensor([5.0, 6.0]))
    total.zero_()
    graph.replay()
    assert total.tolist() == [5.0, 6.0] and x.tolist() == [10.0, 7.0]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 2.0

    def forward(self, x):
        return x * self.scale


def test_a_replay_enters_no_module_and_sees_no_attribute(sim):
    model = torch.fx.symbolic_trace(nn.Sequential(Scaled(), nn.ReLU()))
    plain = nn.Sequential(Scaled(), nn.ReLU())
    (x,) = placed(sim, [1.0, -2.0])
    graph, (out, traced_out) = sim.capture(lambda: (plain(x), model(x)), sim.new_pool())
    plain[0].scale = 100.0
    x.copy_(torch.tensor([-1.0, 3.0]))
    entered = []
    before = nn.modules.module.register_module_forward_pre_hook(lambda *_: entered.append("module"))
    sys.setprofile(
        lambda frame, event, _: entered.append("forward") if frame.f_code.co_name == "forward" else 0
    )
    try:
        graph.replay()
    finally:
        sys.setprofile(None)
        before.remove()
    assert entered == []
    assert out.tolist() == traced_out.tolist() == [0.0, 6.0]
    plain(x)
    assert graph.operations == ["aten::mul.Tensor", "aten::relu", "aten::mul.Tensor", "aten::relu"]


def test_an_opaque_piece_is_one_operation_with_results_at_recorded_addresses(sim):
    x, y = placed(sim, [1.0, 2.0], [3.0, 4.0])
    piece = Opaque()
    graph, (total, product, mean) = sim.capture(
        lambda: (*(found := sim.launch(piece, [x, y])), found[0].mean()), sim.new_pool()
    )
    addresses = [total.data_ptr(), product.data_ptr()]
    x.copy_(torch.tensor([10.0, 20.0]))
    graph.replay()
    assert graph.operations == ["opaque piece", "aten::mean"]
    assert total.tolist() == [13.0, 24.0] and product.tolist() == [30.0, 80.0] and mean.item() == 18.5
    assert addresses == [total.data_ptr(), product.data_ptr()]
    assert all(sim.memory.holds(t) for t in (total, product))


def test_what_a_replay_reads_from_freed_memory_is_nan(sim):
    x, workspace = placed(sim, [1.0, 2.0], [3.0, 4.0])
    box = [workspace]
    graph, out = sim.capture(lambda: x + box[0], sim.new_pool())
    box[0] = sim.place(torch.tensor([5.0, 6.0]))
    graph.replay()
    assert out.tolist() == [4.0, 6.0], "the old buffer lives: the graph reads it, not the new one"
    del workspace
    graph.replay()
    assert bool(out.isnan().all())


def test_memory_that_was_free_at_capture_is_nan_at_replay(sim):
    x, long = placed(sim, [1.0, 2.0], [3.0] * 100)
    pool = sim.new_pool()
    first, (dropped, kept) = sim.capture(lambda: (x + 1, x + 2), pool)
    weak = sim.weak_reference(dropped)
    del dropped
    second, other = sim.capture(lambda: long * 2, pool)
    assert other.data_ptr() != weak.data_ptr(), "the gap is too small for the second graph's result"
    first.replay()
    assert weak.tolist() == [2.0, 3.0] and kept.tolist() == [3.0, 4.0]
    second.replay()
    assert kept.tolist() == [3.0, 4.0]
    assert bool(weak.isnan().all()), "the second graph was allowed to use that memory"


def test_memory_freed_inside_a_capture_is_nan_for_later_operations(sim):
    (x,) = placed(sim, [1.0, 2.0])
    stale = []

    def work():
        stale.append(sim.weak_reference(x + 1))
        return torch.empty_like(x), stale[0] * 1.0

    graph, (_, out) = sim.capture(work, sim.new_pool())
    graph.replay()
    assert bool(out.isnan().all())


def test_uninitialised_memory_is_nan_at_every_replay(sim):
    (x,) = placed(sim, [1.0, 2.0])
    graph, out = sim.capture(lambda: torch.empty_like(x), sim.new_pool())
    out.fill_(1.0)
    graph.replay()
    assert graph.operations == ["aten::empty_like"]
    pool = sim.new_pool()
    second, (scratch, copy) = sim.capture(lambda: ((e := x.new_empty(2)), e * 1.0), pool)
    scratch.fill_(1.0)
    assert bool(copy.isnan().all())
    del scratch
    second.replay()
    assert bool(copy.isnan().all())


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (lambda x: x.sum().item(), "item"),
        (lambda x: x.tolist(), "tolist"),
        (lambda x: 1 if (x > 0).any() else 0, "__bool__"),
        (lambda x: int(x[0]), "__int__"),
        (lambda x: float(x[0]), "__float__"),
        (lambda x: x.numpy(), "numpy"),
        (lambda x: x.cpu(), "cpu"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 0], "index"),
        (lambda x: torch.equal(x, x), "equal"),
    ],
)
def test_a_capture_refuses_to_wait_for_the_device(sim, read, name):
    (x,) = placed(sim, [1.0, 2.0])
    with pytest.raises(CaptureError, match=name):
        sim.capture(lambda: read(x), sim.new_pool())
    assert sim.graphs == 0
    x[torch.tensor([1, 0])]
    sim.capture(lambda: x + 1, sim.new_pool())


def test_a_capture_refuses_tensors_outside_of_the_memory(sim):
    (x,) = placed(sim, [1.0, 2.0])
    outside = torch.ones(2)
    with pytest.raises(CaptureError, match=r"aten::add\.Tensor reads a tensor outside .*\(other\)"):
        sim.capture(lambda: x + outside, sim.new_pool())
    with pytest.raises(CaptureError, match="outside"):
        sim.capture(lambda: x[torch.tensor([0])], sim.new_pool())
    with pytest.raises(CaptureError, match=r"opaque piece .*\(input 1\)"):
        sim.capture(lambda: sim.launch(Opaque(), [x, outside]), sim.new_pool())
    with pytest.raises(CaptureError, match="running already"):
        sim.capture(lambda: sim.capture(lambda: None, sim.new_pool()), sim.new_pool())
    with pytest.raises(CaptureError, match="in the middle of a capture"):
        sim.capture(lambda: sim.zeros((2,), torch.float32), sim.new_pool())


def test_a_number_is_an_argument_by_value(sim):
    (x,) = placed(sim, [1.0, 2.0])
    factor = torch.tensor(3.0)

    def work():
        y = x * factor
        y[1:] = 0
        return y

    graph, out = sim.capture(work, sim.new_pool())
    factor.fill_(100.0)
    x.copy_(torch.tensor([5.0, 6.0]))
    graph.replay()
    assert out.tolist() == [15.0, 0.0]


def test_the_graph_budget_is_kept(sim):
    small = SimDevice(capacity=1 << 22, graph_budget=2)
    (x,) = placed(small, [1.0])
    graphs = [small.capture(lambda: x + 1, small.new_pool())[0] for _ in range(2)]
    with pytest.raises(DeviceError, match="no room for more than 2 graphs"):
        small.capture(lambda: x + 1, small.new_pool())
    graphs[0].release()
    graphs[0].release()
    with pytest.raises(CaptureError, match="released"):
        graphs[0].replay()
    small.capture(lambda: x + 1, small.new_pool())
    assert small.graphs == 1, "a graph that nobody has is released"


def test_a_graph_takes_memory_and_gives_it_back(sim):
    (x,) = placed(sim, [1.0])
    before = sim.free_memory()
    pool = sim.new_pool()
    graph, out = sim.capture(lambda: x + 1, pool)
    assert before - sim.free_memory() >= 4096 + pool.reserved
    graph.release()
    del out, pool
    assert sim.free_memory() == before


def test_host_lengths_stay_frozen_until_an_update_is_joined():
    sim = SimDevice(capacity=1 << 22, lengths="host")
    (x,) = placed(sim, [1.0, 2.0, 3.0, 4.0])
    index = torch.tensor([0, 1])
    graph, out = sim.capture(lambda: x.index_select(0, index), sim.new_pool())
    index.copy_(torch.tensor([2, 3]))
    graph.replay()
    assert out.tolist() == [1.0, 2.0], "frozen at capture"
    update = graph.update({"index": torch.tensor([3, 0])})
    graph.replay()
    assert out.tolist() == [1.0, 2.0], "not joined"
    update.join()
    graph.replay()
    assert out.tolist() == [4.0, 1.0]
    with pytest.raises(CaptureError, match="lengths is no host argument of this graph; it has: index"):
        graph.update({"lengths": index})
    with pytest.raises(
        CaptureError, match=r"index was captured as torch.int64 \[2\], not as torch.int64 \[3\]"
    ):
        graph.update({"index": torch.tensor([1, 2, 3])})
    outside = torch.ones(4)
    with pytest.raises(CaptureError, match="outside"):
        sim.capture(lambda: x + outside, sim.new_pool())


def test_sim_by_name():
    assert make_device("sim").lengths == "device" and make_device("sim:host").lengths == "host"
    assert make_device("sim").graph_modes("decode") == ("full", "piecewise", "eager")
    assert make_device("sim").graph_modes("prefill") == ("piecewise", "eager")


def test_captures_leave_no_holes_in_the_hosts_memory():
    """Each operation's results are in host memory first, between records that stay."""
    before = """
        import torch
        from piecework.devices.sim import SimDevice
        sim = SimDevice(capacity=2**28)
        pool = sim.new_pool()
        x, w = sim.place(torch.ones(2048, 64)), sim.place(torch.ones(64, 2048))
        def work():
            y = x
            for _ in range(4):
                y = (y @ w).relu()[:, :64].contiguous() + 1
            return y
        kept = [sim.capture(work, pool)]
        """
    grown = run_measured(before, "kept += [sim.capture(work, pool) for _ in range(8)]")
    assert grown < 200 * 2**20  # a gigabyte, where the holes stay; a capture's own results take 20 MiB
