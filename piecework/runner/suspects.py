"""Pages that may hold numbers that are none: zeroed before the next sequence begins to write to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from piecework.kvcache import PagedKVCache, pages_for
from piecework.kvcache.pool import DUMMY_PAGE
from piecework.runner.batch import BatchItem


class SuspectPages:
    """What sequences had whose results were not finite.

    Such a page is given out again like any other, and attention reads it to its end: a NaN behind the tokens
    of its next owner is masked, and would still poison a softmax times V.
    """

    def __init__(self, cache: PagedKVCache) -> None:
        self._cache = cache
        self._pages: set[int] = set()

    def add(self, pages: Iterable[int]) -> None:
        """Suspect these, and the dummy page. Others may read them: they stay until nobody does."""
        self._pages.update(pages, (DUMMY_PAGE,))

    @torch.inference_mode()
    def clear(self, items: Sequence[BatchItem]) -> None:
        """Zero those that items begin to write to, which hold nothing that anybody has computed.

        The dummy page never does, and shorter page tables of a batch are filled up with it.
        """
        if not self._pages:
            return
        size, found = self._cache.page_size, self._pages & {DUMMY_PAGE}
        for item in items:
            found.update(self._pages.intersection(item.pages[pages_for(item.span.start, size) :]))
        if found:
            index = self._cache.device.place(torch.tensor(sorted(found)))
            for tensor in self._cache.tensors().values():
                tensor.index_fill_(0, index, 0)
            self._pages -= found
