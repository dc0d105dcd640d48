"""Metrics of the programs that the engine runs: what was built, captured and replayed, and what fell back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_PASS = "pass_matches."
_SHAPE = {
    "pieces": "Pieces of the program",
    "holes": "Holes between them; a model that could not be traced is one",
    "distinct": "Distinct pieces",
}
_EVENTS = {
    "traces": "Graphs traced",
    "stored_programs": "Programs that came out of the disk cache",
    "compiles": "Distinct pieces compiled, when the program was made: here, or by the start that stored it",
    "cache_hits": "Compiled pieces that came out of the disk cache",
    "compile_failures": "Pieces that run uncompiled because their compiler failed",
    "moved_pieces": "Pieces that run on another device because theirs failed",
    "captures": "Device graphs captured",
    "replays": "Device graphs replayed",
    "eager_runs": "Runs outside a graph",
    "chained_runs": "Those of them that were one call of the device's library",
    "whole_runs": "Steps that were one call of a compiler's whole program",
    "padded_tokens": "Rows computed for nothing, to fill a captured size",
    "recompiles": "Compilations after the start; there should be none",
}


def graph_metrics(counts: Mapping[str, Mapping[str, int]]) -> Iterator[Metric]:
    """Make metrics of the counters of each program, by its name (body, head)."""
    for name, what in _SHAPE.items():
        shape = GaugeMetricFamily(f"piecework_graph_{name}", what, labels=["program"])
        for program, found in counts.items():
            shape.add_metric([program], found[name])
        yield shape
    for name, what in _EVENTS.items():
        events = CounterMetricFamily(f"piecework_graph_{name}", what, labels=["program"])
        for program, found in counts.items():
            events.add_metric([program], found[name])
        yield events
    matches = CounterMetricFamily(
        "piecework_graph_pass_matches", "Matches of a pass", labels=["program", "pass"]
    )
    for program, found in counts.items():
        for key, count in found.items():
            if key.startswith(_PASS):
                matches.add_metric([program, key.removeprefix(_PASS)], count)
    yield matches
