"""The header of a GGUF file: its metadata and where each tensor lies.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package's reader makes
a numpy array for each token of the vocabulary and takes seconds; this one takes a fraction of one.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from piecework.cache import cache_root, file_key, try_read_json, try_write
from piecework.errors import ModelError
from piecework.weights.gguf.special import find_end_of_turn
from piecework.weights.gguf.types import READABLE

log = logging.getLogger(__name__)

HEADER_VERSION = 1
VERSIONS = (2, 3)
LONG_ARRAY = 1024  # longer ones (the vocabulary) are left out of the short header
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: its ggml type's number, shape in torch order (rows first), first byte and size in bytes.

    `nbytes` is None where the type is not one that Piecework reads.
    """

    type: int
    shape: tuple[int, ...]
    start: int
    nbytes: int | None


@dataclass(frozen=True)
class Header:
    """What stands before the tensors. `metadata` has the file's own key names."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @property
    def architecture(self) -> str:
        """The `general.architecture`; a ModelError where the file has none."""
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise ModelError(f"{self.path}: the metadata has no general.architecture")
        return name


class _Cursor:
    """Reads values one after the other; a value beyond the end of the file is a ModelError."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.position, self.size = data, path, 0, len(data)

    def claim(self, count: int) -> int:
        """Move on by `count` bytes and return where they start."""
        start = self.position
        if count > self.size - start:
            raise ModelError(
                f"{self.path}: truncated: the header needs byte {start + count}, the file has {self.size}"
            )
        self.position = start + count
        return start

    def scalars(self, code: str, count: int = 1) -> tuple[Any, ...]:
        start = self.claim(struct.calcsize(f"<{code}") * count)
        return struct.unpack_from(f"<{count}{code}", self.data, start)

    def number(self, code: str) -> int:
        return int(self.scalars(code)[0])

    def string(self) -> str:
        start = self.claim(self.number("Q"))
        return self.data[start : self.position].decode()

    def strings(self, count: int) -> list[str]:
        """`count` strings: the hot loop of a header, so it keeps its own position."""
        unpack, data, position, size = struct.Struct("<Q").unpack_from, self.data, self.position, self.size
        found: list[str] = []
        for _ in range(count):
            if position + 8 > size:
                self.claim(position + 8 - self.position)
            start = position + 8
            position = start + unpack(data, position)[0]
            if position > size:
                self.claim(position - self.position)
            found.append(data[start:position].decode())
        self.position = position
        return found

    def value(self, kind: int) -> Any:
        """One metadata value of the type with this number."""
        if kind in _SCALARS:
            return self.scalars(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ModelError(f"{self.path}: damaged: a metadata value has the unknown type {kind}")
        item, count = self.number("I"), self.number("Q")
        if item == _STRING:
            return self.strings(count)
        if item in _SCALARS:
            return list(self.scalars(_SCALARS[item], count))
        raise ModelError(f"{self.path}: a metadata value is an array of type {item}, which is not supported")


def read_header(path: Path) -> Header:
    """Parse the header of a GGUF file.

    Raises ModelError for a file that is missing, not GGUF, of another version, or truncated.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(data, path))
    except FileNotFoundError as error:
        raise ModelError(f"{path}: no such file") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: damaged: a name or text in the header is not UTF-8 ({error})") from error
    except (OSError, ValueError) as error:  # mmap refuses an empty file with a ValueError
        raise ModelError(f"{path}: cannot be read ({error})") from error


def _parse(cursor: _Cursor) -> Header:
    path = cursor.path
    magic = cursor.data[:4]
    if magic != b"GGUF":
        raise ModelError(f"{path}: not a GGUF file: it starts with {magic!r}, not b'GGUF'")
    cursor.position = 4
    version = cursor.number("I")
    if version not in VERSIONS:
        hint = " (big-endian files are not read)" if version & 0xFFFF == 0 else ""
        raise ModelError(f"{path}: GGUF version {version}{hint} is not supported: 2 or 3")
    num_tensors, num_values = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number("I"))
    entries = [_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelError(f"{path}: damaged: general.alignment is {alignment!r}")
    base = -(-cursor.position // alignment) * alignment  # the next multiple
    tensors: dict[str, TensorInfo] = {}
    for name, shape, number, offset in entries:
        if name in tensors:
            raise ModelError(f"{path}: damaged: two tensors are named {name}")
        tensors[name] = _locate(cursor, name, shape, number, base + offset)
    return Header(path, metadata, tensors)


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    dims = cursor.number("I")
    if not 1 <= dims <= 4:
        raise ModelError(f"{cursor.path}: damaged: tensor {name} has {dims} dimensions")
    shape = tuple(reversed(cursor.scalars("Q", dims)))
    return name, shape, cursor.number("I"), cursor.number("Q")


def _locate(cursor: _Cursor, name: str, shape: tuple[int, ...], number: int, start: int) -> TensorInfo:
    kind = READABLE.get(number)
    if kind is None:
        return TensorInfo(number, shape, start, None)
    if shape[-1] % kind.block:
        raise ModelError(
            f"{cursor.path}: tensor {name} has rows of {shape[-1]} weights, "
            f"not a multiple of the {kind.block} of a {kind.name} block"
        )
    nbytes = math.prod(shape) // kind.block * kind.size
    end = start + nbytes
    if end > cursor.size:
        raise ModelError(
            f"{cursor.path}: truncated: tensor {name} ends at byte {end}, the file has {cursor.size}"
        )
    return TensorInfo(number, shape, start, nbytes)


def short_header(path: Path, cache_dir: str | os.PathLike[str] | None = None) -> Header:
    """The header without its long arrays (the vocabulary), from the cache where the file is unchanged.

    An end-of-turn token that only the vocabulary shows is filled in as `tokenizer.ggml.eot_token_id`.
    """
    if not path.is_file():
        raise ModelError(f"{path}: no such file")
    stored = cached(path, cache_dir, "header.json", HEADER_VERSION)
    value = try_read_json(stored)
    if value is not None:
        try:
            found = {n: {**t, "shape": tuple(t["shape"])} for n, t in value["tensors"].items()}
            return Header(path, dict(value["metadata"]), {n: TensorInfo(**t) for n, t in found.items()})
        except (AttributeError, KeyError, TypeError) as error:
            log.warning("the cache file %s is damaged (%r); it is made again", stored, error)
    header = read_header(path)
    metadata = {k: v for k, v in header.metadata.items() if not (isinstance(v, list) and len(v) > LONG_ARRAY)}
    eot = find_end_of_turn(header.metadata)
    if eot is not None:
        metadata["tokenizer.ggml.eot_token_id"] = eot
    content = {"metadata": metadata, "tensors": {n: asdict(t) for n, t in header.tensors.items()}}
    try_write(stored, json.dumps(content))
    return Header(path, metadata, header.tensors)


def cached(path: Path, cache_dir: str | os.PathLike[str] | None, name: str, version: int) -> Path:
    """Where the cache keeps the file `name` that was made of the GGUF file at `path`."""
    return cache_root(cache_dir) / "gguf" / file_key(path, version) / name
