"""Prometheus metrics of one server, with the prefix `piecework_`; each app has its own registry.

Requests are counted as they end (an engine observer); gauges and engine counters are read from
`Service.stats()` at the scrape.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import Scope

from piecework.engine.outputs import Delta
from piecework.sampling import SamplingParams
from piecework.server.audit_metrics import audit_metrics
from piecework.server.failover_metrics import failover_metrics
from piecework.server.graph_metrics import graph_metrics
from piecework.server.worker_metrics import worker_metrics
from piecework.version import __version__

if TYPE_CHECKING:
    from piecework.engine.service import Service

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
_REQUEST = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)


class ServerMetrics:
    """Counts what the server and its engine do. It is an observer of the engine's service."""

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()
        self._http = Counter(
            "piecework_http_requests",
            "HTTP requests by route, method and status (499 or 0: the client left first)",
            ("route", "method", "status"),
            registry=self.registry,
        )
        self._ttft = self._histogram("time_to_first_token", "arrival to first token", _FIRST_TOKEN)
        self._itl = self._histogram("inter_token_latency", "one token to the next", _TOKEN)
        self._e2e = self._histogram("e2e_request_latency", "arrival to last token", _REQUEST)
        self._queue = self._histogram("request_queue_time", "arrival to first step", _FIRST_TOKEN)
        self.registry.register(_EngineCollector(service))

    def finished(self, params: SamplingParams, delta: Delta) -> None:
        """A sample ended; `delta` is its last one. Called from the engine's thread."""
        timing = delta.timing
        if timing is None or delta.finish_reason not in ("stop", "length"):
            return
        self._queue.observe(timing.queue)
        self._ttft.observe(timing.ttft)
        self._e2e.observe(timing.e2e)
        for seconds in timing.itl:
            self._itl.observe(seconds)

    def answered(self, scope: Scope, status: int) -> None:
        """An HTTP request was answered. Unknown paths and methods share one label each."""
        route = getattr(scope.get("route"), "path", "none")
        method = "other" if route == "none" or status == 405 else scope["method"]
        self._http.labels(route, method, str(status)).inc()

    def text(self) -> bytes:
        """The metrics in Prometheus' text format; reads the engine's numbers now."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        full = f"piecework_{name}_seconds"
        return Histogram(full, f"Seconds from {what}", buckets=buckets, registry=self.registry)


class _EngineCollector(Collector):
    """The engine's own numbers, read at the scrape."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> list[Metric]:
        """Nothing is asked of the engine at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Read the engine's statistics and profile."""
        stats = self._service.stats()
        info = InfoMetricFamily("piecework", "Version, model and device")
        device = str(self._service.health().get("device", ""))
        info.add_metric([], {"version": __version__, "model": self._service.model_name, "device": device})
        yield info
        yield _gauge("requests_running", "Requests that run", stats.running)
        yield _gauge("requests_waiting", "Requests that wait", stats.waiting)
        yield _gauge("kv_pages", "Pages in the KV cache", stats.kv_pages_total)
        yield _gauge("kv_pages_used", "Pages of the KV cache in use", stats.kv_pages_used)
        yield _gauge("kv_pages_cached", "Pages that only the prefix cache holds", stats.kv_pages_cached)
        yield _gauge("kv_cache_usage_ratio", "Share of the KV pages in use, 0 to 1", stats.kv_usage)
        yield _counter("requests_received", "Requests handed to the engine", stats.requests_total)
        yield _counter("prompt_tokens", "Prompt tokens", stats.prompt_tokens_total)
        yield _counter("generation_tokens", "Generated tokens", stats.generation_tokens_total)
        yield _counter("preemptions", "Requests that lost their pages for a while", stats.preemptions_total)
        yield _counter("prefix_hits", "Requests that began behind cached pages", stats.prefix_hits_total)
        yield _counter(
            "prefix_cached_tokens", "Tokens that weren't computed again", stats.prefix_cached_tokens_total
        )
        yield _counter(
            "prefix_evictions", "Cached pages that were given up for others", stats.prefix_evictions_total
        )
        yield _counter("engine_steps", "Steps of the engine", stats.steps_total)
        yield _counter(
            "overlapped_steps", "Steps that were sent while another one ran", stats.overlapped_steps_total
        )
        ended = CounterMetricFamily("piecework_requests", "Samples that ended", labels=["finish_reason"])
        for reason in sorted({"stop", "length", "abort", "error", *stats.finished}):
            ended.add_metric([reason], stats.finished.get(reason, 0))
        yield ended
        moved = CounterMetricFamily(
            "piecework_kv_moved_bytes",
            "Bytes that a static KV cache moved in place",
            labels=["move", "tensor"],
        )
        for name, count in stats.kv_moved_bytes.items():
            moved.add_metric(name.split("."), count)
        yield moved
        yield from failover_metrics(self._service)
        yield from audit_metrics(self._service)
        yield from graph_metrics(self._service.graph_counters())
        yield from worker_metrics(self._service.workers())
        yield from self._profile()

    def _profile(self) -> Iterator[Metric]:
        snapshot = self._service.profile.snapshot()
        seconds = CounterMetricFamily("piecework_profile_seconds", "Time in a stage", labels=["timer"])
        calls = CounterMetricFamily("piecework_profile_calls", "Runs of a stage", labels=["timer"])
        for name, timer in snapshot["timers"].items():
            seconds.add_metric([name], timer["total_ms"] / 1e3)
            calls.add_metric([name], timer["count"])
        moved = CounterMetricFamily("piecework_profile_bytes", "Bytes moved", labels=["counter"])
        for name, counter in snapshot["bytes"].items():
            moved.add_metric([name], counter["total"])
        events = CounterMetricFamily("piecework_profile_events", "Events counted", labels=["counter"])
        for name, count in snapshot["counters"].items():
            events.add_metric([name], count)
        yield from (seconds, calls, moved, events)


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"piecework_{name}", what, value=value)


def _counter(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(f"piecework_{name}", what, value=value)
