"""Pages are given out once, come back once, and positions map to the right slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piecework.devices import make_device
from piecework.kvcache import LayerShape, PagedKVCache, PageError, PagePool, page_bytes, pages_for, slots_of


@given(st.integers(2, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_pool_keeps_count(num_pages, actions):
    pool = PagePool(num_pages)
    owned: list[list[int]] = []
    for take, n in actions:
        if take:
            pages = pool.allocate(n)
            assert (pages is None) == (n > pool.usable - sum(map(len, owned)))
            if pages is not None:
                owned.append(pages)
        elif owned:
            pool.release(owned.pop(n % len(owned)))
        flat = [p for pages in owned for p in pages]
        assert len(set(flat)) == len(flat) == pool.used and 0 not in flat
    for pages in owned:
        pool.release(pages)
    assert pool.free == pool.usable == num_pages - 1


def test_shared_pages_stay_until_the_last_owner_leaves():
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.share(pages)
    pool.release(pages)
    assert pool.used == 2
    pool.release(pages)
    assert pool.used == 0
    with pytest.raises(PageError, match="is not in use"):
        pool.release(pages)
    with pytest.raises(PageError, match="page 0"):
        pool.share([0])
    with pytest.raises(PageError, match="at least 2 pages"):
        PagePool(1)


def test_slots_follow_the_page_list():
    table = np.array([[7, 2], [5, 0]], np.int32)
    owners, positions = np.array([0, 0, 0, 1, 0]), np.array([3, 4, 5, 1, 6])
    assert slots_of(table, owners, positions, 4).tolist() == [31, 8, 9, 21, 10]
    assert [pages_for(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_cache_has_the_bytes_it_says_and_is_finite():
    layers = [LayerShape(2, 8), LayerShape(1, 16)]
    cache = PagedKVCache(layers, 5, 4, torch.bfloat16, make_device("cpu"))
    assert cache.nbytes == 5 * page_bytes(layers, 4, torch.bfloat16) == 5 * 2 * (2 * 8 + 16) * 4 * 2
    assert cache.keys[0].shape == (5, 2, 4, 8) and cache.values[1].shape == (5, 1, 4, 16)
    assert not any(t.any() for t in (*cache.keys, *cache.values))
