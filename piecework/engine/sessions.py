"""The slots of a static cache between requests: a prompt that goes on where one ended begins behind it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from piecework.engine.request import Request
from piecework.kvcache import PagePool


class Sessions:
    """Gives each request a slot, and remembers of whose tokens a free one still has the keys and values."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._kept: dict[int, array[int]] = {}  # by slot, the least recently used first
        self._lost: set[int] = set()

    def admit(self, request: Request, *, reuse: bool) -> bool:
        """Give a request the free slot that has most of its first tokens; False where no slot is free.

        Its last known token is always computed. With `reuse` off it begins in front. Where no slot has
        anything of it, it gets one that holds nothing, else the least recently used one. A slot that would
        lose more than the request finds there, as where two chats begin alike, is not taken from its
        sequence while another holds nothing.
        """
        free = self._pool.free_pages
        if not free:
            return False
        order = list(self._kept)
        slots = sorted(free, key=lambda slot: order.index(slot) if slot in self._kept else -1)
        known = {slot: self._common(slot, request) if reuse else 0 for slot in slots}
        slot = max(slots, key=known.__getitem__)
        if slots[0] not in self._kept and 2 * known[slot] < len(self._kept.get(slot, ())):
            slot = slots[0]
        self._pool.claim(slot)
        self._kept.pop(slot, None)
        self._lost.discard(slot)
        request.pages.append(slot)
        request.computed = known[slot]
        if request.cached_tokens is None:
            request.cached_tokens = known[slot]
        return True

    def release(self, request: Request, *, keep: bool) -> None:
        """Remember, with `keep`, what a request that gives up its slot has computed in it."""
        for slot in request.pages:
            if keep and slot not in self._lost and request.computed:
                self._kept[slot] = array("q", request.tokens(0, request.computed))

    def forget(self, slots: Iterable[int]) -> None:
        """Let nobody use what these slots hold now."""
        for slot in slots:
            self._lost.add(slot)
            self._kept.pop(slot, None)

    def _common(self, slot: int, request: Request) -> int:
        """Number of tokens that a request begins with and that a slot holds."""
        kept = self._kept.get(slot, array("q"))
        most = min(len(kept), request.num_tokens - 1)
        mine = request.tokens(0, most)
        return next((i for i in range(most) if kept[i] != mine[i]), most)
