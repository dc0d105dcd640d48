"""Stop strings in text that is cut anywhere."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from piecework.tokenizer.stop import StopMatcher

stops = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)
pieces = st.lists(st.tuples(st.text("abc", max_size=4), st.booleans()), max_size=8)


def first_stop(text: str, stops: list[str], counts: list[bool]) -> tuple[int, str] | None:
    """Go through the text character by character; the longest stop string that ends there wins."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending and counts[end - 1]:
            return end, max(ending, key=len)
    return None


@given(stops=stops, pieces=pieces, include=st.booleans())
@settings(max_examples=500, deadline=None)
def test_the_first_stop_string_ends_the_text_however_it_is_cut(
    stops: list[str], pieces: list[tuple[str, bool]], include: bool
) -> None:
    text = "".join(piece for piece, _ in pieces)
    counts = [check for piece, check in pieces for _ in piece]
    expected = first_stop(text, stops, counts)
    matcher = StopMatcher(stops, include)
    out, found = "", None
    for piece, check in pieces:
        new, stop = matcher.push(piece, check)
        assert found is None or (new, stop) == ("", None)
        out, found = out + new, found or stop
    out += matcher.flush()
    if expected is None:
        assert (out, found) == (text, None)
    else:
        end, stop = expected
        assert found == stop
        assert out == text[: end if include else end - len(stop)]


@given(stops=stops, pieces=st.lists(st.text("abc", max_size=4), max_size=8))
@settings(max_examples=300, deadline=None)
def test_no_more_is_held_back_than_might_begin_a_stop_string(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    out, text = "", ""
    for piece in pieces:
        new, stop = matcher.push(piece)
        out, text = out + new, text + piece
        if stop:
            return
        held = text[len(out) :]
        assert held == max(
            (text[i:] for i in range(len(text)) if begins(stops, text[i:])), key=len, default=""
        )


def begins(stops: list[str], text: str) -> bool:
    return any(stop.startswith(text) and stop != text for stop in stops)


def test_without_stop_strings_nothing_is_held_back() -> None:
    matcher = StopMatcher(())
    assert matcher.push("anything") == ("anything", None)
    assert matcher.flush() == ""


def test_a_long_stop_string_costs_no_more_than_its_length() -> None:
    matcher = StopMatcher(["a" * 5000 + "b"])
    for _ in range(5000):
        assert matcher.push("a") == ("", None)
    assert matcher.push("b") == ("", "a" * 5000 + "b")
