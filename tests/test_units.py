"""Sizes as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecework.units import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("536870912", 2**29),
        ("512M", 2**29),
        ("512MiB", 2**29),
        ("512MB", 512_000_000),
        ("1GiB", 2**30),
        ("1 gib", 2**30),
        (" 2t ", 2**41),
        ("1.5G", 3 * 2**29),
        ("1.5GB", 1_500_000_000),
        ("7B", 7),
        ("4k", 4096),
    ],
)
def test_parse(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "M", "-1", "1e3", "1.5.2G", "3 parsecs", "1 G B", "0x10"])
def test_parse_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size in bytes such as"):
        parse_size(text)


@given(st.integers(min_value=0, max_value=2**60))
def test_plain_numbers_are_exact(count: int) -> None:
    assert parse_size(str(count)) == count


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * 2**29, "1.5 GiB"), (2**42, "4.0 TiB")],
)
def test_format(count: int, text: str) -> None:
    assert format_size(count) == text
