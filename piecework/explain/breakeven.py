"""Up to how many tokens captured prefill pays: launches cost the same at every size, arithmetic doesn't."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from piecework.capture.options import CaptureOptions
from piecework.capture.plan import CapturePlan
from piecework.explain.report import BreakEven
from piecework.graph.counters import Counters
from piecework.kvcache import PagedKVCache, pages_for
from piecework.profile import now
from piecework.runner.batch import BatchItem, Span, build_inputs
from piecework.runner.programs import Programs, cache_dtype, layer_shapes

_FIRST, _ROUNDS = 16, 5


def break_even(programs: Programs) -> BreakEven:
    """Measure where captures are real and take host time; else say why there is nothing to measure."""
    device = programs.device
    if programs.options.prefill != "piecewise":
        return BreakEven(None, f"prefill runs its pieces eagerly on {device.name}, so nothing is replayed")
    if device.torch_device.type == "cpu":
        return BreakEven(None, f"not measured: graphs of {device.name} are interpreted, so they save no time")
    planned = programs.plan.sizes.get("piecewise", ()) if programs.plan is not None else ()
    sizes = _doubling(planned)
    if not sizes:
        return BreakEven(None, "not measured: no size of prefill is captured")
    return judge(measure(programs, sizes))


def _doubling(planned: Sequence[int]) -> list[int]:
    """About one planned size for each doubling, the largest among them."""
    chosen: list[int] = []
    for size in planned:
        if size >= (2 * chosen[-1] if chosen else _FIRST):
            chosen.append(size)
    return [*chosen, planned[-1]] if planned and planned[-1] not in chosen else chosen


def measure(programs: Programs, sizes: Sequence[int]) -> list[tuple[int, float, float]]:
    """Time one prompt of each size, eager and captured in turns; median milliseconds.

    Nothing of it shows in the programs' counters, and its captures are released.
    """
    model, device = programs.model, programs.device
    page_size = programs.config.cache.page_size
    pages = pages_for(max(sizes), page_size)
    dtype = cache_dtype(programs.config, model.dtype, device)
    cache = PagedKVCache(layer_shapes(model), pages + 1, page_size, dtype, device)
    aside = replace(programs, counters=Counters(), head_counters=Counters())
    eager = replace(aside, options=CaptureOptions("eager", "eager")).over_pages(cache)
    captured = replace(aside, options=CaptureOptions("eager", "piecewise", (), tuple(sizes))).over_pages(
        cache
    )
    captured.capture(CapturePlan({"piecewise": tuple(sizes)}, len(sizes) * programs.body.num_pieces, None))
    measured = []
    try:
        for size in sizes:
            item = BatchItem([0] * size, Span(0, size), range(1, pages_for(size, page_size) + 1))
            inputs = build_inputs([item], page_size, device)
            times: dict[str, list[float]] = {"eager": [], "captured": []}
            for _ in range(_ROUNDS + 1):
                for name, runner in (("eager", eager), ("captured", captured)):
                    device.synchronize()
                    start = now()
                    runner.run("prefill", inputs.input_ids, inputs.positions, inputs.metadata)
                    device.synchronize()
                    times[name].append((now() - start) * 1e3)
            # The first round pays for what is set up once.
            measured.append((size, median(times["eager"][1:]), median(times["captured"][1:])))
    finally:
        captured.release()
    return measured


def judge(measured: Sequence[tuple[int, float, float]]) -> BreakEven:
    """Find the largest size up to which every captured run was faster."""
    tokens = 0
    for size, eager, captured in measured:
        if captured >= eager:
            break
        tokens = size
    if not tokens:
        note = f"captured prefill was not faster at {measured[0][0]} tokens, the least that was tried"
        return BreakEven(None, note, tuple(measured))
    if tokens == measured[-1][0]:
        note = f"captured prefill is faster up to {tokens} tokens, the most that is captured"
    else:
        note = f"captured prefill is faster up to {tokens} tokens; above, launches no longer dominate"
    return BreakEven(tokens, note, tuple(measured))
