"""The disk cache: keys by content, atomic entries, stale ones refused by name."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from piecework.compile.cache import PieceCache, StaleEntryError, content_key

KEY = content_key({"graph": "g"})


def _store(cache: PieceCache, text: str = "payload", key: str = KEY) -> None:
    cache.store(key, lambda path: path.write_text(text) and None, {"failed": []})


def test_key_is_that_of_the_content() -> None:
    assert content_key({"a": 1, "b": [2]}) == content_key({"b": [2], "a": 1})
    assert len({content_key(p) for p in ({"a": 1}, {"a": 2}, {"b": 1}, {"a": "1"})}) == 4


def test_entry_comes_back(tmp_path: Path) -> None:
    cache = PieceCache(tmp_path / "pieces")
    assert cache.load(KEY) is None
    _store(cache)
    found = PieceCache(tmp_path / "pieces").load(KEY)
    assert found is not None
    assert found[0].read_text() == "payload" and found[1] == {"failed": []}
    assert sorted(p.suffix for p in cache.folder.iterdir()) == [".bin", ".json"]


@pytest.mark.parametrize("damage", ["payload", "missing", "header", "renamed", "format"])
def test_entry_that_is_not_what_its_name_says_is_refused(tmp_path: Path, damage: str) -> None:
    cache = PieceCache(tmp_path)
    _store(cache)
    header, payload = tmp_path / f"{KEY}.json", next(tmp_path.glob("*.bin"))
    if damage == "payload":
        payload.write_text("payloaD")
    elif damage == "missing":
        payload.unlink()
    elif damage == "header":
        header.write_text("{")
    elif damage == "format":
        header.write_text(json.dumps({**json.loads(header.read_text()), "format": 0}))
    other = content_key({"graph": "h"})
    key = other if damage == "renamed" else KEY
    if damage == "renamed":
        header.rename(tmp_path / f"{other}.json")
    with pytest.raises(StaleEntryError, match=key[:16]):
        cache.load(key)
    _store(cache, key=key)
    assert cache.load(key) is not None


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        PieceCache(tmp_path).store(KEY, fail, {})
    assert list(tmp_path.iterdir()) == []


def test_what_a_dead_process_left_is_swept(tmp_path: Path) -> None:
    old, young = tmp_path / "tmp-1-old", tmp_path / "tmp-2-young"
    for path in (old, young):
        path.write_text("half")
    os.utime(old, (0, 0))
    _store(PieceCache(tmp_path))
    assert not old.exists() and young.exists()


def test_many_writers_of_one_entry(tmp_path: Path) -> None:
    cache = PieceCache(tmp_path)
    seen: list[str] = []

    def work(number: int) -> None:
        for turn in range(20):
            _store(cache, f"{number} {turn}")
            found = cache.load(KEY)
            assert found is not None
            seen.append(found[0].read_text())

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 80
