"""Resizes the KV cache between two steps: no request is dropped, and no address changes."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from piecework.engine.scheduler import Scheduler
from piecework.errors import DeviceError, RequestError
from piecework.kvcache import PagedKVCache, PagePool, pages_for
from piecework.profile import Profile

log = logging.getLogger("piecework.engine")


@dataclass(frozen=True)
class KVSize:
    """The KV cache after a change.

    Attributes:
        pages: with the dummy page, as in the setting `num_pages`.
        bytes: of these pages.
        min_pages, max_pages: that it can have.
        moved_pages: that got another place, so that those behind could go.
        preempted: requests that lost their pages and compute them again.
    """

    pages: int
    bytes: int
    min_pages: int
    max_pages: int
    moved_pages: int = 0
    preempted: int = 0


class Resizer:
    """Changes the number of pages of one engine. It always leaves the pages of a request of `longest` tokens,
    the longest that is admitted, so that each one runs to its end, if alone.
    """

    def __init__(self, cache: PagedKVCache, pool: PagePool, scheduler: Scheduler, profile: Profile) -> None:
        self._cache = cache
        self._pool = pool
        self._scheduler = scheduler
        self._profile = profile

    def size(self, longest: int) -> KVSize:
        """Return what there is and what could be."""
        cache = self._cache
        least = pages_for(longest, cache.page_size) + 1
        most = cache.max_pages if cache.resizable else cache.num_pages
        return KVSize(cache.num_pages, cache.nbytes, min(least, cache.num_pages), most)

    def resize(self, pages: int, longest: int) -> KVSize:
        """Have `pages` pages.

        Where the requests that run have more, the prefix tree gives up what no request holds, then the
        youngest wait again. Raises RequestError, with nothing changed, where `pages` can't be, and what the
        device raises where it fails at a shrink: then all requests wait again, and the size stays.
        """
        self._check(pages, longest)
        cache, pool, scheduler = self._cache, self._pool, self._scheduler
        preempted = scheduler.preemptions
        moves: dict[int, int] = {}
        with self._profile.time("kv.resize"):
            if pages < cache.num_pages:
                scheduler.shrink_to(pages - 1)
                moves = pool.resize(pages)
                scheduler.renumber(moves)
                try:
                    self._profile.add_bytes("kv.compact", cache.copy_pages(moves))
                    cache.resize(pages)
                except Exception:
                    scheduler.shrink_to(0)  # a page's new place may not have what was in it
                    pool.resize(cache.num_pages)
                    raise
            else:
                try:
                    cache.resize(pages)
                except DeviceError as error:
                    raise _refused(pages, f"{error}", "out_of_memory") from error
                pool.resize(pages)
        preempted = scheduler.preemptions - preempted
        log.info("%d KV pages; %d moved, %d requests wait again", pages, len(moves), preempted)
        return replace(self.size(longest), moved_pages=len(moves), preempted=preempted)

    def _check(self, pages: int, longest: int) -> None:
        cache = self._cache
        if isinstance(pages, bool) or not isinstance(pages, int):
            raise _refused(pages, "an integer", "invalid_value")
        if not cache.resizable:
            raise _refused(pages, cache.fixed_because, "not_resizable")
        least = pages_for(longest, cache.page_size) + 1
        if pages < least:
            message = f"at least {least}, the dummy page and one request of max_model_len={longest} tokens"
            raise _refused(pages, message, "kv_pages_needed")
        if pages > cache.max_pages:
            message = f"at most {cache.max_pages}, the max_num_pages that addresses are reserved for"
            raise _refused(pages, message, "kv_pages_limit")
        device = cache.device
        added = (pages - cache.num_pages) * (cache.nbytes // cache.num_pages)
        if added > max(device.free_memory(), 0):
            message = f"it takes {added} bytes more, and {device.free_memory()} are free on {device.name}"
            raise _refused(pages, message, "out_of_memory")


def _refused(pages: object, allowed: str, code: str) -> RequestError:
    return RequestError(f"pages={pages!r} is not allowed: {allowed}", param="pages", code=code)
