"""What running requests have in the KV cache, carried from one runner's to the next one's.

Only what steps committed counts: a request's tokens up to `computed`. The step that failed may have written
the slots behind them, which the next one writes again before anything reads them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from piecework.devices.memory import available_host_memory
from piecework.engine.request import Request
from piecework.engine.scheduler import Scheduler
from piecework.kvcache import CarriedPages, PagedKVCache, PagePool, pages_for
from piecework.profile import now
from piecework.workers.serving.runner import StepRunner

log = logging.getLogger("piecework.engine")


@dataclass(frozen=True)
class Carried:
    """Pages that were read from the cache of a runner that is given up; None with the `reason` why none were.

    `seconds` is how long that took.
    """

    pages: CarriedPages | None = None
    reason: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Carriage:
    """How running requests came to a device: tokens whose KV was copied, and those to be computed again.

    `reason` says why some are; `seconds` were spent on reading and writing pages.
    """

    at: float
    device: str
    copied_tokens: int
    computed_tokens: int
    bytes: int
    seconds: float
    reason: str | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "at": round(self.at, 3),
            "device": self.device,
            "copied_tokens": self.copied_tokens,
            "computed_tokens": self.computed_tokens,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 4),
            "reason": self.reason,
        }


def pack(scheduler: Scheduler, runner: StepRunner, doubt: str | None) -> Carried:
    """Read what running requests have computed, unless there is a `doubt`, or it can't be read."""
    began, cache = now(), runner.cache
    if doubt is not None:
        return Carried(reason=doubt)
    if not isinstance(cache, PagedKVCache):
        return Carried(reason="the cache is not in pages of this process")
    pages = list(dict.fromkeys(page for request in scheduler.running for page in _written(request, cache)))
    size = len(pages) * (cache.nbytes // cache.num_pages)
    if size > available_host_memory() // 2:
        return Carried(reason=f"there is no room for {size} bytes in host memory")
    try:
        found = CarriedPages.read(cache, pages)
        if not found.is_finite():
            return Carried(reason="there are numbers in the cache that are none")
    except Exception as error:
        log.info("the cache of %s can't be read: %s", runner.device.name, error)
        return Carried(reason=f"the cache can't be read: {' '.join(str(error).split())}")
    return Carried(found, None, now() - began)


def unpack(
    carried: Carried, scheduler: Scheduler, runner: StepRunner, pool: PagePool, *, static: bool
) -> Carriage:
    """Begin with the cache of `runner`, whose pages `pool` counts, and bring into it what was carried.

    Running requests go on running as far as there is room, the oldest first; others wait, to be computed
    again. Of the prefix tree stays what those hold that go on. `static`: that cache has slots.
    """
    began, cache, reason = now(), runner.cache, carried.reason
    pages = carried.pages
    known = sum(request.computed for request in scheduler.running)
    if pages is not None and not (isinstance(cache, PagedKVCache) and pages.fits(cache)):
        pages, reason = None, f"the cache of {runner.device.name} has another layout"
    moves = scheduler.restart(pool, cache.page_size, static=static, carried=pages.rows if pages else ())
    if pages is not None:
        try:
            pages.write(cache, moves)
        except Exception as error:
            log.info("the cache of %s can't be written: %s", runner.device.name, error)
            reason = f"the cache can't be written: {' '.join(str(error).split())}"
            scheduler.restart(pool, cache.page_size)
            moves = {}
    copied = sum(request.computed for request in scheduler.running)
    for request in scheduler.running:
        scheduler.keep(request)
    if copied < known and reason is None:
        reason = f"the cache of {runner.device.name} has less room"
    size = pages.nbytes * len(moves) // len(pages.rows) if pages is not None and moves else 0
    seconds = carried.seconds + now() - began
    return Carriage(time.time(), runner.device.name, copied, known - copied, size, seconds, reason)


def _written(request: Request, cache: PagedKVCache) -> Iterable[int]:
    return request.pages[: pages_for(request.computed, cache.page_size)]
