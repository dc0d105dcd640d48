"""Random numbers that are a function of seed and index."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from piecework.runner.random import hash64, mix, sub_seed, uniform

seeds = st.integers(-(2**63), 2**64 - 1)


def test_the_hash_is_splitmix64() -> None:
    # The first outputs of splitmix64.c from state 0: the state grows by the golden gamma, then is mixed.
    gamma = 0x9E3779B97F4A7C15
    outputs = [mix((i + 1) * gamma) for i in range(3)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@given(seed=seeds, index=st.integers(0, 2**20))
def test_numbers_are_in_range_and_repeat(seed: int, index: int) -> None:
    assert 0.0 <= uniform(seed, index) < 1.0
    assert uniform(seed, index) == uniform(seed, index) == uniform(seed % 2**64, index)
    assert 0 <= sub_seed(seed, index) < 2**64


def test_numbers_are_spread_evenly_over_seeds_and_over_indices() -> None:
    for numbers in ([uniform(seed, 0) for seed in range(20000)], [uniform(7, i) for i in range(20000)]):
        bins = [0] * 50
        for number in numbers:
            bins[int(number * 50)] += 1
        chi_square = sum((count - 400) ** 2 / 400 for count in bins)
        assert abs(chi_square - 49) < 5 * math.sqrt(2 * 49)


def test_neighbouring_seeds_and_indices_are_not_correlated() -> None:
    pairs = [(uniform(s, i), uniform(s + 1, i), uniform(s, i + 1)) for s in range(100) for i in range(100)]
    for other in (1, 2):
        covariance = sum((p[0] - 0.5) * (p[other] - 0.5) for p in pairs) / len(pairs)
        assert abs(covariance * 12) < 5 / math.sqrt(len(pairs))


def test_samples_have_seeds_of_their_own() -> None:
    assert sub_seed(5, 0) == 5
    assert sub_seed(-1, 0) == 2**64 - 1
    values = {sub_seed(seed, i) for seed in range(100) for i in range(128)}
    assert len(values) == 100 * 128
    # A sample's seed is none of the numbers that the request's own tokens are drawn with.
    assert not values & {hash64(seed, i) for seed in range(100) for i in range(128)}
