"""Places between the calls of a piece: none that is needed is given away, and none is wasted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from piecework.compile.arena import ALIGNMENT, Life, lay_out
from piecework.compile.plan import Size

sizes = st.builds(Size, st.integers(0, 5000), st.integers(0, 300))
lives = st.builds(lambda s, a, n: Life(s, a, a + n), sizes, st.integers(0, 12), st.integers(0, 6))


@given(st.lists(lives, max_size=14))
def test_what_lives_at_the_same_time_lies_apart(made: list[Life]) -> None:
    starts, total = lay_out(made)
    for tokens in (1, 2, 37, 65536):
        spans = [
            (s.at(tokens), s.at(tokens) + life.size.at(tokens)) for s, life in zip(starts, made, strict=True)
        ]
        assert all(start % ALIGNMENT == 0 and end <= total.at(tokens) for start, end in spans)
        for i, (life, (start, end)) in enumerate(zip(made, spans, strict=True)):
            for other, (left, right) in zip(made[:i], spans[:i], strict=True):
                together = life.first <= other.last and other.first <= life.last
                assert not together or end <= left or right <= start


def test_memory_is_used_again() -> None:
    chain = [Life(Size(4096, 0), i, i + 1) for i in range(10)]
    _, total = lay_out(chain)
    assert total == Size(2 * 4096, 0)
    _, total = lay_out([Life(Size(10, 0), 0, 0), Life(Size(0, 100), 1, 1), Life(Size(64, 7), 2, 2)])
    assert total == Size(64, 128)
