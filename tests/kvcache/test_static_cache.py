"""The static cache against a dense copy: what every program sees, whatever was moved before."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from piecework.devices import make_device
from piecework.devices.base import Device
from piecework.errors import ConfigError, DeviceError
from piecework.kvcache import Capacities, LayerShape, StaticKVCache
from piecework.kvcache.capacity import kept
from piecework.kvcache.static import KEY_DIM

LAYERS = [LayerShape(2, 4), LayerShape(3, 5)]
SIZES = (4, 7, 16)


def cache_on(device: Device, *, transposed: bool, slots: int = 1) -> StaticKVCache:
    capacities = Capacities(SIZES, 4)
    return StaticKVCache(LAYERS, capacities, slots, torch.float32, device, transpose_values=transposed)


def fresh(count: int, transposed: bool, rng: torch.Generator) -> tuple[list[torch.Tensor], ...]:
    """New keys and values of all layers, for one token more than counts, as padded programs give them."""
    shapes = [(1, s.num_kv_heads, count + 1, s.head_dim) for s in LAYERS]
    keys, values = ([torch.randn(shape, generator=rng) for shape in shapes] for _ in range(2))
    return keys, [v.transpose(2, 3).contiguous() if transposed else v for v in values]


def compare(cache: StaticKVCache, capacity: int, wanted: list[list[torch.Tensor]]) -> None:
    """Live tokens are those that were written, and behind them everything is zero."""
    for layer in range(len(LAYERS)):
        views = (cache.keys, KEY_DIM), (cache.values, cache.value_dim)
        for (view, dim), whole in zip(views, wanted, strict=True):
            found = view(layer, 1, capacity)
            live = whole[layer].shape[dim]
            assert found.is_contiguous() and found.shape[dim] == capacity
            assert torch.equal(found.narrow(dim, 0, live), whole[layer])
            assert not found.narrow(dim, live, capacity - live).any()


@pytest.mark.parametrize("transposed", [False, True])
@settings(deadline=None, max_examples=40)
@given(steps=st.lists(st.tuples(st.sampled_from(SIZES), st.integers(0, 16), st.integers(1, 6)), max_size=8))
def test_any_order_of_programs_sees_the_tokens_that_were_written(
    transposed: bool, steps: list[tuple[int, int, int]]
) -> None:
    cache, rng = cache_on(make_device("sim"), transposed=transposed), torch.Generator().manual_seed(3)
    dims = KEY_DIM, cache.value_dim
    nothing = zip(fresh(0, transposed, rng), dims, strict=True)
    wanted = [[x.narrow(dim, 0, 0) for x in xs] for xs, dim in nothing]
    written = 0
    for capacity, live, count in steps:
        live = min(live, written, capacity)
        cache.arrange(1, capacity, live)
        wanted = [[x.narrow(dim, 0, live) for x in xs] for xs, dim in zip(wanted, dims, strict=True)]
        compare(cache, capacity, wanted)
        count = min(count, capacity - live)
        new = fresh(count, transposed, rng)
        cache.write(1, count, *new)
        wanted = [
            [torch.cat((x, n.narrow(dim, 0, count)), dim) for x, n in zip(xs, ns, strict=True)]
            for xs, ns, dim in zip(wanted, new, dims, strict=True)
        ]
        compare(cache, capacity, wanted)
        written = live + count
    assert all(count > 0 for count in cache.moved_bytes.values())


@pytest.mark.parametrize(("device", "transposed"), [("sim", True), ("cpu", False), ("cpu", True)])
def test_moves_are_counted_by_their_reason(device: str, transposed: bool) -> None:
    cache, rng = cache_on(make_device(device), transposed=transposed), torch.Generator().manual_seed(3)
    cache.arrange(1, 16, 0, prefill=True)
    cache.write(1, 3, *fresh(3, transposed, rng))
    assert not cache.moved_bytes
    for capacity, prefill in ((4, False), (7, False), (4, False), (16, True)):
        cache.arrange(1, capacity, 3, prefill=prefill)
    # Of H heads' keys all but the first move, and of H * E rows of transposed values.
    keys = sum((s.num_kv_heads - 1) * s.head_dim for s in LAYERS) * 3 * 4
    values = sum(s.num_kv_heads * s.head_dim - 1 for s in LAYERS) * 3 * 4 if transposed else keys
    reasons = ("to_decode", "promotion", "demotion", "to_prefill")
    assert cache.moved_bytes == {
        f"{reason}.{name}": count
        for reason in reasons
        for name, count in (("keys", keys), ("values", values))
    }


def test_what_was_under_a_mask_before_is_gone() -> None:
    cache = cache_on(make_device("cpu"), transposed=True)
    nan = [torch.full((1, s.num_kv_heads, 6, s.head_dim), float("nan")) for s in LAYERS]
    cache.arrange(1, 16, 0)
    cache.write(1, 6, nan, [x.transpose(2, 3) for x in nan])
    cache.arrange(1, 16, 0)
    assert all(not cache.keys(layer, 1, 16).isnan().any() for layer in range(2))
    assert all(not cache.values(layer, 1, 16).isnan().any() for layer in range(2))


def test_tokens_of_a_slot_whose_move_failed_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, rng = cache_on(make_device("cpu"), transposed=False), torch.Generator().manual_seed(3)
    cache.arrange(1, 16, 0)
    cache.write(1, 3, *fresh(3, False, rng))

    def fail(*args: object) -> int:
        raise DeviceError("cpu", "run", "no")

    with monkeypatch.context() as patch, pytest.raises(DeviceError, match="no"):
        patch.setattr("piecework.kvcache.static.relayout", fail)
        cache.arrange(1, 4, 3)
    with pytest.raises(DeviceError, match="3 tokens wanted of slot 1, which has none"):
        cache.arrange(1, 4, 3)
    cache.arrange(1, 4, 0)
    with pytest.raises(DeviceError, match="1 tokens wanted of slot 1, which has 0"):
        cache.arrange(1, 4, 1)


def test_capacities_are_settled_in_one_place() -> None:
    made = Capacities.choose((4, 16), limit=16, chunk=512)
    assert (made.largest, made.longest, made.chunk) == (16, 17, 16)
    assert [made.variant(n) for n in (1, 4, 5, 16)] == [4, 4, 16, 16]
    assert kept(16, 1) == made.largest == kept(1, 16)
    assert Capacities.choose((), limit=3000, chunk=8).sizes == (1024, 2048, 3000)
    with pytest.raises(ConfigError, match=r"kv_capacities='4,32'.* at most 16 tokens"):
        Capacities.choose((4, 32), limit=16, chunk=8)
    with pytest.raises(ConfigError, match=r"at least 19 tokens for max_model_len=20"):
        Capacities.choose((4, 16), limit=64, chunk=8, asked=20)
    assert Capacities.choose((4, 16), limit=64, chunk=8, asked=17).longest == 17
