"""Fewer and more pages: numbers, contents and memory of a cache without an engine."""

from __future__ import annotations

from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from piecework.devices import make_device
from piecework.devices.sim import SimDevice
from piecework.errors import DeviceError
from piecework.kvcache import LayerShape, PagedKVCache, PageError, PagePool, PrefixTree

LAYERS = [LayerShape(2, 8), LayerShape(1, 16)]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "give", "resize"]), st.integers(0, 40)), max_size=40))
def test_pages_in_use_keep_their_contents_under_any_resizes(actions):
    """A list of numbers stands for the cache: what is written under a page stays readable by its owner."""
    pool, contents = PagePool(12), [0] * 64
    owned: dict[int, list[int]] = {}
    for number, (action, n) in enumerate(actions, start=1):
        if action == "take":
            pages = pool.allocate(n % 6)
            if pages:
                owned[number] = pages
                for page in pages:
                    contents[page] = number
        elif action == "give" and owned:
            pool.release(owned.pop(sorted(owned)[n % len(owned)]))
        elif action == "resize":
            target, before = n + 1, pool.num_pages
            if target < 2 or target <= pool.used:
                with pytest.raises(PageError, match="do not fit"):
                    pool.resize(target)
                assert pool.num_pages == before
            else:
                moves = pool.resize(target)
                assert not set(moves) & set(moves.values())
                for old, new in moves.items():
                    contents[new] = contents[old]
                contents[target:] = [0] * (64 - target)
                owned = {k: [moves.get(p, p) for p in pages] for k, pages in owned.items()}
        pool.check(owned.values())
        assert all(contents[page] == key for key, pages in owned.items() for page in pages)


def test_the_check_sees_a_page_that_was_lost_or_shared_without_a_count():
    pool = PagePool(6)
    pages = pool.allocate(3)
    pool.check([pages])
    for holders in ([pages[:2]], [pages, pages[:1]]):
        with pytest.raises(PageError, match="other holders"):
            pool.check(holders)
    with pytest.raises(PageError, match="not in use"):
        pool.check([pages, [5]])


def test_the_tree_takes_over_new_numbers_and_gives_up_the_oldest_first():
    pool = PagePool(10)
    tree = PrefixTree(pool, 2)
    sequences = [[1, 2, 3, 4], [5, 6]]
    for tokens in sequences:
        pages = array("i", tree.allocate(len(tokens) // 2))
        tree.extend(tree.root, lambda a, b, t=tokens: t[a:b], pages, len(tokens))
        tree.release(pages)
    assert (tree.held, tree.idle) == (0, 3)
    tree.evict(2)  # the leaf of the sequence that ended first
    first = tree.find(None, lambda a, b: sequences[0][a:b], 2)
    other = tree.find(None, lambda a, b: sequences[1][a:b], 1)
    assert (first.depth, other.depth, tree.evictions) == (1, 1, 1)
    high = {first.page, other.page}
    moves = pool.resize(3)
    tree.renumber(moves)
    assert {first.page, other.page} == {1, 2} and set(moves) == high - {1, 2} != set()
    pool.check([[node.page for node in tree.nodes()]])
    assert sorted(tree.take(first) + tree.take(other)) == [1, 2] and tree.idle == 0


@pytest.mark.parametrize("name", ["cpu", "sim"])
def test_a_cache_keeps_its_addresses_and_what_is_in_its_pages(name):
    cache = PagedKVCache(LAYERS, 200, 4, torch.float32, make_device(name), 300)
    tensors = cache.tensors()
    assert cache.resizable and cache.keys[0].shape == (300, 2, 4, 8)
    for tensor in tensors.values():
        assert not tensor[:200].any()
        tensor[:200] = torch.arange(200.0).view(200, 1, 1, 1)
    addresses = {key: t.data_ptr() for key, t in tensors.items()}
    moves = {199 - i: 3 + i for i in range(90)}
    assert cache.copy_pages(moves) == 90 * cache.nbytes // 200
    assert cache.copy_pages({}) == 0
    cache.resize(109)
    for tensor in cache.tensors().values():
        assert tensor[:3, 0, 0, 0].tolist() == [0, 1, 2]
        assert tensor[3:93, -1, -1, -1].tolist() == [199 - i for i in range(90)]
    cache.resize(300)
    for key, tensor in cache.tensors().items():
        assert tensor.data_ptr() == addresses[key] and not tensor[109:].any()


def test_sim_counts_committed_memory_and_poisons_the_rest():
    device = SimDevice(capacity=1 << 20)
    free = device.free_memory()
    cache = PagedKVCache([LayerShape(1, 16)], 10, 4, torch.float32, device, 100)
    page = cache.nbytes // 10
    assert device.free_memory() == free - 10 * page and cache.keys[0][10:].isnan().all()
    cache.resize(4)
    assert device.free_memory() == free - 4 * page and cache.keys[0][4:].isnan().all()
    taken = device.zeros((device.free_memory() // 4 - 64,), torch.float32)
    with pytest.raises(DeviceError, match="are free"):
        cache.resize(50)
    assert cache.num_pages == 4 and cache.keys[0][4:].isnan().all() and not cache.keys[0][:4].any()
    del taken
    cache.resize(50)
    assert device.free_memory() == free - 50 * page
    with pytest.raises(DeviceError, match="addresses wanted"):
        device.reserve(2 << 20)
    del cache
    assert device.free_memory() == free


def test_a_device_without_reservations_refuses():
    device = make_device("cpu")
    device.reserve = lambda size: None
    cache = PagedKVCache(LAYERS, 5, 4, torch.float32, device, 5)
    assert not cache.resizable and cache.keys[0].shape[0] == 5
    with pytest.raises(DeviceError, match="no addresses without memory"):
        cache.resize(4)
