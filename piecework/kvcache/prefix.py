"""Full pages of the KV cache by the tokens that they hold: a known beginning isn't computed again.

A radix tree over token ids (Morrison 1968; for KV caches Zheng et al. 2023, arXiv:2312.07104), of which each
edge is one page of tokens: a page below another one continues it. Edges are found by a hash of their tokens
and compared token by token, so that no two prompts are ever taken for the same.

The tree has a reference to each of its pages, and requests have theirs. A request always holds a whole path
from the root, so a page that only the tree holds has none below it that a request holds. Such idle pages are
kept in the order in which they fell idle, the ones below before the ones above: the first of them is always a
leaf, and the one that was used least recently.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from piecework.kvcache.pool import DUMMY_PAGE, PagePool

Tokens = Callable[[int, int], Sequence[int]]
"""tokens(start, stop) gives a sequence's token ids at these positions."""


class Node:
    """A page of tokens behind those of its parent; `depth` pages lead up to its end. One without a parent is
    the root, or is no longer part of the tree.
    """

    __slots__ = ("children", "depth", "key", "page", "parent")

    def __init__(self, parent: Node | None, key: bytes, page: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[bytes, Node] = {}


class PrefixTree:
    """Gives out the pages of a pool, and keeps those that are full and known for whoever needs them next.

    `hits` counts sequences that began behind known pages, `hit_tokens` the tokens in those, `evictions` the
    pages that were given up for others. All costs are per page that is touched: none grows with the tree.
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self.root = Node(None, b"", DUMMY_PAGE)
        self.hits = 0
        self.hit_tokens = 0
        self.evictions = 0
        self._pool = pool
        self._page_size = page_size
        self._nodes: dict[int, Node] = {}  # by page
        self._idle: OrderedDict[Node, None] = OrderedDict()

    def __len__(self) -> int:
        """Number of pages in the tree."""
        return len(self._nodes)

    def nodes(self) -> Iterator[Node]:
        """Yield what is in the tree, in no order."""
        return iter(self._nodes.values())

    @property
    def idle(self) -> int:
        """Number of pages that only the tree holds."""
        return len(self._idle)

    @property
    def held(self) -> int:
        """Number of pages that requests hold."""
        return self._pool.used - len(self._idle)

    @property
    def available(self) -> int:
        """Number of pages that `allocate` can give out."""
        return self._pool.free + len(self._idle)

    def allocate(self, count: int) -> list[int] | None:
        """Give out `count` pages, or None (and none of them) where fewer are free or idle."""
        if count > self.available:
            return None
        self.evict(self._pool.used + self._pool.free - count)
        return self._pool.allocate(count)

    def evict(self, most: int) -> None:
        """Give up idle pages, the least recently used first, until at most `most` pages are in use."""
        while self._pool.used > most and self._idle:
            self._drop(next(iter(self._idle)))
            self.evictions += 1

    def renumber(self, moves: Mapping[int, int]) -> None:
        """Take over the new numbers of pages; see `PagePool.resize`."""
        for old in moves.keys() & self._nodes.keys():
            node = self._nodes.pop(old)
            node.page = moves[old]
            self._nodes[node.page] = node

    def release(self, pages: Sequence[int]) -> None:
        """Drop a reference to each page of a sequence, which stand in its order."""
        for page in reversed(pages):
            self._pool.release((page,))
            node = self._nodes.get(page)
            if node is not None and self._pool.references(page) == 1:
                self._idle[node] = None

    def find(self, start: Node | None, tokens: Tokens, most: int) -> Node:
        """Return the deepest node, at most `most` pages deep, of a sequence's path.

        `start` is one that was found before for the same tokens; None is the root.
        """
        node = self.root if start is None or start.parent is None else start
        while node.depth < most:
            child = node.children.get(self.key(node, tokens))
            if child is None:
                break
            node = child
        return node

    def key(self, node: Node, tokens: Tokens) -> bytes:
        """Return the edge that a sequence takes behind `node`; its next page must be full."""
        start = node.depth * self._page_size
        return array("i", tokens(start, start + self._page_size)).tobytes()

    def take(self, node: Node) -> list[int]:
        """Return the pages that lead up to `node`, each with a reference for the caller."""
        pages = []
        while node.parent is not None:
            self._hold(node)
            pages.append(node.page)
            node = node.parent
        pages.reverse()
        return pages

    def extend(self, node: Node, tokens: Tokens, pages: array[int], computed: int) -> Node:
        """Enter the pages of a sequence that are full; returns the node of the last.

        `node` is that of the last page which the tree has; the sequence's `pages` hold `computed` tokens. A
        page that the tree got from another sequence meanwhile takes the place of the sequence's own.
        """
        if node.parent is None and node is not self.root:
            return node  # its page was given up, and nothing can follow
        while (node.depth + 1) * self._page_size <= computed:
            key, page = self.key(node, tokens), pages[node.depth]
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = self._nodes[page] = Node(node, key, page)
                self._pool.share((page,))
            elif child.page != page:
                self._hold(child)
                self._pool.release((page,))
                pages[node.depth] = child.page
            node = child
        return node

    def forget(self, pages: Iterable[int]) -> None:
        """Take these pages, and all that continue them, out of the tree; sequences keep theirs."""
        for page in pages:
            if page in self._nodes:
                self._forget(self._nodes[page])

    def clear(self) -> None:
        """Take all pages out of the tree, for example where their memory is lost."""
        for node in list(self.root.children.values()):
            self._forget(node)

    def restart(self, pool: PagePool, page_size: int) -> None:
        """Go on with another pool, of which no page is known; the counts go on."""
        self.clear()
        self._pool, self._page_size = pool, page_size

    def _forget(self, top: Node) -> None:
        found = [top]
        for node in found:  # it grows on the way
            found.extend(node.children.values())
        for node in reversed(found):
            self._drop(node)

    def _hold(self, node: Node) -> None:
        self._pool.share((node.page,))
        self._idle.pop(node, None)

    def _drop(self, node: Node) -> None:
        """Take a leaf out of the tree."""
        assert node.parent is not None and not node.children
        del node.parent.children[node.key]
        node.parent = None
        del self._nodes[node.page]
        self._idle.pop(node, None)
        self._pool.release((node.page,))
