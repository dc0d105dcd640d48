"""Metrics of the accuracy audit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from piecework.engine.service import Service


def audit_metrics(service: Service) -> Iterator[Metric]:
    """Make metrics of a service's audits; none where nothing is audited."""
    report = service.audit()
    if report is None:
        return
    steps = CounterMetricFamily(
        "piecework_audit", "Steps that also ran on the reference, by what came of it", labels=["result"]
    )
    for result, count in (("good", report.good), ("missed", report.missed), ("skipped", report.skipped)):
        steps.add_metric([result], count)
    yield steps
    for name, what, value in (
        ("last", "Error of the last audit", report.last),
        ("greatest", "Greatest error of an audit", report.greatest),
    ):
        if value is not None:
            yield GaugeMetricFamily(f"piecework_audit_{name}_nrmse", f"{what}, over the range", value=value)
