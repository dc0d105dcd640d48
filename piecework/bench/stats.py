"""Means, deviations and percentiles of measured times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median, pstdev


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` (0 to 100) percent lie, interpolated; nan for no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def describe_ms(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Return mean, median, std and p99 in milliseconds under keys such as `mean_ttft_ms`; 0 for no values."""
    if not seconds:
        return {f"{kind}_{name}_ms": 0.0 for kind in ("mean", "median", "std", "p99")}
    return {
        f"mean_{name}_ms": fmean(seconds) * 1e3,
        f"median_{name}_ms": median(seconds) * 1e3,
        f"std_{name}_ms": pstdev(seconds) * 1e3,
        f"p99_{name}_ms": percentile(seconds, 99) * 1e3,
    }
