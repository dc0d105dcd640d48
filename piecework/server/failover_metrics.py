"""Metrics of fail-safe execution: which device is in use, and the moves that led to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from piecework.engine.service import Service

_LABELS = ["from", "to", "stage", "reason"]


def failover_metrics(service: Service) -> Iterator[Metric]:
    """Make metrics of a service's devices. `reason` is an error's class, since texts have no end."""
    active = GaugeMetricFamily("piecework_active_device", "1 for the device in use", labels=["device"])
    in_use = service.device_name.split(",")  # children of one service may have one each
    for device in dict.fromkeys((*service.config.device.devices, *in_use)):
        active.add_metric([device], float(device in in_use))
    yield active
    moves = CounterMetricFamily("piecework_failover", "Moves from a device that failed", labels=_LABELS)
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
