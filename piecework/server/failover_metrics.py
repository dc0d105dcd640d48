"""Metrics of fail-safe execution: which device is in use, and the moves that led to it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from piecework.engine.gaps import BOUNDS, Seconds

if TYPE_CHECKING:
    from piecework.engine.service import Service

_LABELS = ["from", "to", "stage", "reason"]


def failover_metrics(service: Service) -> Iterator[Metric]:
    """Make metrics of a service's devices. `reason` is an error's class, since texts have no end."""
    active = GaugeMetricFamily("piecework_active_device", "1 for the device in use", labels=["device"])
    reference = service.config.audit.audit_device
    in_use = service.device_name.split(",")  # children of one service may have one each
    known = (*service.config.device.devices, *((reference,) if reference else ()), *in_use)
    for device in dict.fromkeys(known):
        active.add_metric([device], float(device in in_use))
    yield active
    what = "Moves from a device that failed, or that an operator asked for"
    moves = CounterMetricFamily("piecework_failover", what, labels=_LABELS)
    spent = CounterMetricFamily(
        "piecework_failover_seconds", "Time until the next device was ready", labels=_LABELS
    )
    seconds: dict[tuple[str, ...], list[float]] = {}
    for event in service.failovers():
        labels: tuple[str, ...] = (event.source, event.target, event.stage, event.kind)
        seconds.setdefault(labels, []).append(event.seconds)
    for found, times in seconds.items():
        moves.add_metric(found, len(times))
        spent.add_metric(found, sum(times))
    yield from (moves, spent)
    pauses = service.pauses()
    yield _histogram(
        "failover_gap", "a request's last token before a takeover to its first after", pauses.gaps
    )
    yield _histogram(
        "failover_detection", "the begin of a step to the error that it failed with", pauses.detections
    )
    tokens = CounterMetricFamily(
        "piecework_failover_kv_tokens", "Tokens of running requests at takeovers, by way", labels=["way"]
    )
    tokens.add_metric(["copied"], pauses.copied_tokens)
    tokens.add_metric(["computed"], pauses.computed_tokens)
    yield tokens
    standby = service.standby()
    if standby is not None:
        warm = GaugeMetricFamily("piecework_standby_warm", "1 where a standby is ready", labels=["device"])
        warm.add_metric([standby["device"]], float(standby["status"] == "warm"))
        yield warm


def _histogram(name: str, what: str, found: Seconds) -> Metric:
    """Make a family of cumulative buckets, as Prometheus has them."""
    bounds = [*(str(bound) for bound in BOUNDS), "+Inf"]
    buckets = list(zip(bounds, map(float, accumulate(found.counts)), strict=True))
    full = f"piecework_{name}_seconds"
    return HistogramMetricFamily(full, f"Seconds from {what}", buckets=buckets, sum_value=found.sum)
