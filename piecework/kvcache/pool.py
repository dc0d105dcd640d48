"""Which pages of the KV cache are in use: bookkeeping only, no tensors."""

from __future__ import annotations

from collections.abc import Iterable

from piecework.errors import PieceworkError

DUMMY_PAGE = 0


class PageError(PieceworkError):
    """A page was used against the rules: freed twice, or never given out."""


class PagePool:
    """Counts references to pages 1 to num_pages - 1; page 0 is the dummy that padding writes to."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise PageError(f"a pool needs at least 2 pages (one is the dummy), got {num_pages}")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))
        self._references = [0] * num_pages

    @property
    def usable(self) -> int:
        """Number of pages that requests can have in all."""
        return self.num_pages - 1

    @property
    def free(self) -> int:
        """Number of pages that nobody has."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Number of pages that somebody has."""
        return self.usable - self.free

    def allocate(self, count: int) -> list[int] | None:
        """Give out `count` pages, or None (and none of them) where fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    @property
    def free_pages(self) -> tuple[int, ...]:
        """The pages that nobody has."""
        return tuple(self._free)

    def claim(self, page: int) -> None:
        """Give out one page, which must be free."""
        if page not in self._free:
            raise PageError(f"page {page} is not free")
        self._free.remove(page)
        self._references[page] = 1

    def references(self, page: int) -> int:
        """Return how many references to `page` there are."""
        return self._references[page]

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to each of `pages`."""
        for page in pages:
            self._check(page)
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop a reference to each of `pages`; those without any are free again."""
        for page in pages:
            self._check(page)
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def resize(self, num_pages: int) -> dict[int, int]:
        """Have `num_pages` pages from now on; those that are in use beyond them get numbers below.

        Returns the new numbers by the old ones. Whoever has such a page takes over its number, and what is
        in it has to be moved. Raises PageError, with nothing changed, where more are in use than stay.
        """
        if num_pages < 2 or self.used > num_pages - 1:
            raise PageError(f"{self.used} pages and the dummy do not fit into {num_pages} (at least 2)")
        moves: dict[int, int] = {}
        if num_pages >= self.num_pages:
            self._free[:0] = range(num_pages - 1, self.num_pages - 1, -1)  # given out last
            self._references += [0] * (num_pages - self.num_pages)
        else:
            stay = [page for page in self._free if page < num_pages]
            for page in range(num_pages, self.num_pages):
                if self._references[page]:
                    moves[page] = stay.pop()
                    self._references[moves[page]] = self._references[page]
            del self._references[num_pages:]
            self._free = stay
        self.num_pages = num_pages
        return moves

    def check(self, holders: Iterable[Iterable[int]]) -> None:
        """Raise PageError unless `holders` hold all references that are counted, and other pages are free."""
        found = [0] * self.num_pages
        for pages in holders:
            for page in pages:
                self._check(page)
                found[page] += 1
        free = sorted(self._free)
        if found != self._references or free != [p for p in range(1, self.num_pages) if not found[p]]:
            wrong = [p for p in range(self.num_pages) if found[p] != self._references[p]]
            raise PageError(
                f"pages {wrong} have other holders than counted, or {len(free)} free pages are wrong"
            )

    def _check(self, page: int) -> None:
        if not 0 < page < self.num_pages or self._references[page] == 0:
            raise PageError(f"page {page} is not in use (pages 1 to {self.num_pages - 1} can be)")
