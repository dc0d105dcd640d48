"""Pages of a paged KV cache on their way to another cache, through host memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from piecework.kvcache.paged import PAGES_AT_ONCE, PagedKVCache


@dataclass(frozen=True)
class CarriedPages:
    """Contents of pages: row `rows[page]` of each of the cache's `tensors` [n, ...], by their names."""

    rows: Mapping[int, int]
    tensors: Mapping[str, Tensor]
    page_size: int

    @classmethod
    @torch.inference_mode()
    def read(cls, cache: PagedKVCache, pages: Iterable[int]) -> CarriedPages:
        """Copy `pages` of `cache`; raises what the device raises."""
        wanted = list(pages)
        cache.device.synchronize()
        found = {
            name: torch.empty((len(wanted), *tensor.shape[1:]), dtype=tensor.dtype)
            for name, tensor in cache.tensors().items()
        }
        for start in range(0, len(wanted), PAGES_AT_ONCE):
            index = cache.device.place(torch.tensor(wanted[start : start + PAGES_AT_ONCE]))
            for name, tensor in cache.tensors().items():
                found[name][start : start + PAGES_AT_ONCE] = tensor.index_select(0, index)
        return cls({page: row for row, page in enumerate(wanted)}, found, cache.page_size)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def is_finite(self) -> bool:
        """Say whether all is finite, also what no token wrote: a masked NaN would still poison a softmax."""
        floats = (tensor for tensor in self.tensors.values() if tensor.is_floating_point())
        # The sum is finite unless a value isn't, or it overflows: only then is each looked at.
        return all(
            bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(tensor.isfinite().all())
            for tensor in floats
        )

    def fits(self, cache: PagedKVCache) -> bool:
        """Say whether pages of `cache` have this layout: as many tokens, layers, heads, and the same type."""
        others = cache.tensors()
        return (
            cache.page_size == self.page_size
            and others.keys() == self.tensors.keys()
            and all(
                (others[name].dtype, others[name].shape[1:]) == (tensor.dtype, tensor.shape[1:])
                for name, tensor in self.tensors.items()
            )
        )

    @torch.inference_mode()
    def write(self, cache: PagedKVCache, moves: Mapping[int, int]) -> None:
        """Copy pages into `cache`, to the pages that `moves` has for them; raises what the device raises."""
        if not moves:
            return
        rows = torch.tensor([self.rows[page] for page in moves]).split(PAGES_AT_ONCE)
        targets = torch.tensor(list(moves.values())).split(PAGES_AT_ONCE)
        for row, target in zip(rows, targets, strict=True):
            place = cache.device.place(target)
            for name, tensor in cache.tensors().items():
                tensor.index_copy_(0, place, cache.device.place(self.tensors[name].index_select(0, row)))
        cache.device.synchronize()
