"""The prefix tree: what it finds, what it keeps, and what it gives up first."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from piecework.kvcache import Node, PagePool, PrefixTree

PAGE = 4


class Running:
    """A sequence that runs: it finds its beginning, gets pages for the rest, and enters the full ones."""

    def __init__(self, tree: PrefixTree, ids: Sequence[int]) -> None:
        self.tree, self.ids = tree, list(ids)
        known = tree.find(None, self.tokens, (len(ids) - 1) // PAGE)
        self.known = known.depth
        fresh = -(-len(ids) // PAGE) - known.depth
        self.pages = array("i", tree.take(known) + (tree.allocate(fresh) or []))
        self.branch: Node = tree.extend(known, self.tokens, self.pages, len(ids))

    def tokens(self, start: int, stop: int) -> list[int]:
        return self.ids[start:stop]

    def end(self) -> None:
        self.tree.release(self.pages)


def run(tree: PrefixTree, ids: Sequence[int]) -> int:
    """Run a sequence to its end and return how many pages it found."""
    sequence = Running(tree, ids)
    sequence.end()
    return sequence.known


@pytest.fixture
def pool() -> PagePool:
    return PagePool(9)


@pytest.fixture
def tree(pool: PagePool) -> PrefixTree:
    return PrefixTree(pool, PAGE)


def test_full_pages_are_found_but_never_the_last_token(tree: PrefixTree) -> None:
    assert run(tree, range(10)) == 0 and len(tree) == 2
    assert run(tree, range(10)) == 2
    assert run(tree, range(8)) == 1  # its second page holds its last token
    assert run(tree, [0, 1, 2, 3, 9, 9, 9]) == 1
    assert run(tree, [1, 1, 2, 3, 4]) == 0


def test_a_page_is_known_by_all_tokens_before_it(tree: PrefixTree) -> None:
    run(tree, [1, 1, 1, 1, 2, 2, 2, 2, 0])
    assert run(tree, [2, 2, 2, 2, 0]) == 0
    assert run(tree, [3, 3, 3, 3, 2, 2, 2, 2, 0]) == 0


def test_idle_pages_are_given_up_from_the_leaves_the_oldest_first(tree: PrefixTree, pool: PagePool) -> None:
    run(tree, [1] * 4 + [2] * 4 + [0])
    run(tree, [1] * 4 + [3] * 4 + [0])
    run(tree, [7] * 5)
    run(tree, [1] * 4 + [2] * 4 + [0])  # used again: it is newer than [3] and [7]
    assert len(tree) == tree.idle == 4 and pool.free == 4 and tree.available == 8
    pages = tree.allocate(6)
    assert pages is not None and tree.evictions == 2
    tree.release(pages)
    assert run(tree, [1] * 4 + [2] * 4 + [0]) == 2
    assert run(tree, [1] * 4 + [3] * 4 + [0]) == 1 and run(tree, [7] * 5) == 0
    assert tree.available == 8


def test_pages_in_use_are_not_given_up(tree: PrefixTree, pool: PagePool) -> None:
    first = Running(tree, range(16))
    second = Running(tree, range(9))
    assert second.known == 2 and second.pages[:2] == first.pages[:2]
    first.end()
    assert tree.idle == 2 and tree.available == 4 + 1
    assert tree.allocate(6) is None
    assert len(tree.allocate(5) or ()) == 5 and tree.idle == 0 and len(tree) == 2


def test_what_two_computed_at_once_is_kept_once(tree: PrefixTree, pool: PagePool) -> None:
    ids = list(range(9))
    pages = [array("i", tree.allocate(3) or []) for _ in range(2)]
    for own in pages:
        tree.extend(tree.root, lambda start, stop: ids[start:stop], own, 9)
    assert pages[0][:2] == pages[1][:2] and pages[0][2] != pages[1][2]
    assert pool.used == 4 and tree.idle == 0
    for own in pages:
        tree.release(own)
    assert pool.used == tree.idle == len(tree) == 2


def test_what_is_forgotten_is_not_found_and_takes_what_continues_it_along(
    tree: PrefixTree, pool: PagePool
) -> None:
    first = Running(tree, range(12))
    second = Running(tree, [*range(4), 9, 9, 9, 9, 9])
    tree.forget(first.pages)
    assert len(tree) == 0 and run(tree, range(12)) == 0
    # Nothing can follow a page that is gone, and the sequences keep theirs.
    assert tree.extend(second.branch, second.tokens, second.pages, 9) is second.branch
    assert tree.find(second.branch, second.tokens, 2).depth == 1
    first.end()
    second.end()
    tree.clear()
    assert pool.used == len(tree) == tree.idle == 0
