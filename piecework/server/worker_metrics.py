"""Metrics of the workers that run the engine's steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

if TYPE_CHECKING:
    from piecework.workers.serving.runner import Context


def worker_metrics(workers: Sequence[Context]) -> Iterator[Metric]:
    """Make metrics of the workers, by their names."""
    info = InfoMetricFamily("piecework_worker", "The process that runs steps", labels=["worker"])
    up = GaugeMetricFamily("piecework_worker_up", "1 where steps can run", labels=["worker"])
    generation = GaugeMetricFamily("piecework_worker_generation", "Starts before this one", labels=["worker"])
    restarts = CounterMetricFamily(
        "piecework_worker_restarts", "Processes that took a dead one's place", labels=["worker"]
    )
    running = GaugeMetricFamily("piecework_worker_requests_running", "Those it runs", labels=["worker"])
    waiting = GaugeMetricFamily("piecework_worker_requests_waiting", "Those that wait", labels=["worker"])
    pending = GaugeMetricFamily(
        "piecework_worker_pending_tokens", "Tokens that it may have to compute", labels=["worker"]
    )
    limit, most = (
        GaugeMetricFamily(f"piecework_worker_ring_{name}", what, labels=["worker", "resource", "ring"])
        for name, what in (("limit", "What a step may take"), ("high_water", "The most that a step took"))
    )
    for worker in workers:
        info.add_metric(
            [worker.name],
            {
                "device": worker.device,
                "kind": worker.kind,
                "pid": str(worker.pid or ""),
                "status": worker.status,
            },
        )
        up.add_metric([worker.name], worker.status == "ready")
        generation.add_metric([worker.name], worker.generation)
        restarts.add_metric([worker.name], worker.restarts)
        running.add_metric([worker.name], worker.running)
        waiting.add_metric([worker.name], worker.waiting)
        if worker.pending_tokens is not None:
            pending.add_metric([worker.name], worker.pending_tokens)
        for resource, figures in worker.rings.items():
            for family, name in ((limit, "limit"), (most, "high_water")):
                for ring, figure in enumerate(figures[name]):
                    family.add_metric([worker.name, resource, str(ring)], figure)
    yield from (info, up, generation, restarts, running, waiting, pending, limit, most)
