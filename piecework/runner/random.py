"""Random numbers as a pure function of (seed, index): no generator state to keep or to replay.

The mixing function and its constants are those of SplitMix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014; constants as in Vigna's reference `splitmix64.c`).
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
# Keeps the seeds of further samples apart from the numbers that are drawn with the request's own seed.
_SUB_SEED_DOMAIN = 0x5851F42D4C957F2D


def mix(value: int) -> int:
    """Return the SplitMix64 finalizer of `value` modulo 2**64, a bijection on 64-bit integers."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def hash64(seed: int, index: int) -> int:
    """Return 64 bits that depend on `seed` and `index` alone. Negative seeds count modulo 2**64."""
    return mix(mix(seed + _GAMMA) + (index + 1) * _GAMMA)


def uniform(seed: int, index: int) -> float:
    """Return a number in [0, 1) with 53 random bits, for token `index` of the sequence with `seed`."""
    return (hash64(seed, index) >> 11) * 2.0**-53


def sub_seed(seed: int, sample: int) -> int:
    """Return the seed of one of a request's `n` samples, in [0, 2**64).

    Sample 0 keeps the request's seed, so it equals the only sample of the same request with n=1.
    """
    if sample == 0:
        return seed & _MASK
    return hash64(mix(seed) ^ _SUB_SEED_DOMAIN, sample)
