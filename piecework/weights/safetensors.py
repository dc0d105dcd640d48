"""A folder with safetensors files as a checkpoint: one file, or shards and an index.

Format: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from piecework.errors import ModelError
from piecework.json_text import parse_json
from piecework.weights.folder import read_config, read_generation_config, read_json
from piecework.weights.mapped import MappedFile

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MODELSLIM = "quant_model_weight*.safetensors"  # as ModelSlim names its files, whole or in shards
STEP = 2**20  # bytes in one step, few enough to stay in a core's cache

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class _Entry:
    file: MappedFile
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class SafetensorsCheckpoint:
    """The weights of a folder in the Hugging Face layout.

    Raises ModelError for a missing or damaged file, naming it (and the tensor, where one is at fault).
    """

    def __init__(
        self, folder: str | os.PathLike[str], cache_dir: str | os.PathLike[str] | None = None
    ) -> None:
        path = Path(folder)
        self.where = str(path)
        shards = _shards(path)
        self.config: dict[str, Any] = read_config(path, cache_dir)
        self.generation_config: dict[str, Any] = read_generation_config(path)
        self._entries: dict[str, _Entry] = {}
        self._files: list[MappedFile] = []
        try:
            for shard, wanted in shards.items():
                self._open(path / shard, wanted)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path, wanted: list[str] | None) -> None:
        file = MappedFile(path)
        self._files.append(file)
        found = _read_header(file)
        missing = [name for name in wanted or () if name not in found]
        if missing:
            raise ModelError(f"{path}: lacks tensors that the index places in it: {', '.join(missing)}")
        self._entries.update({name: found[name] for name in (found if wanted is None else wanted)})

    def names(self) -> list[str]:
        """The names of all weights."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a weight."""
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which a weight is stored."""
        return self._entry(name).dtype

    def load(self, name: str) -> Tensor:
        """A weight as it is stored, on the CPU."""
        entry = self._entry(name)
        out = torch.empty(entry.shape, dtype=entry.dtype)
        self.read(name, out)
        return out

    def read(self, name: str, out: Tensor) -> None:
        """Copy a weight into `out`, cast to its dtype; integers only into integers of the same dtype."""
        entry = self._entry(name)
        if tuple(out.shape) != entry.shape:
            raise ModelError(
                f"{entry.file.path}: tensor {name} has shape {list(entry.shape)}, not {list(out.shape)}"
            )
        self._read(name, entry, entry.start, out)

    def read_rows(self, name: str, first: int, out: Tensor) -> None:
        """Copy the rows of a weight from `first` on into `out`, as `read` does the whole."""
        entry = self._entry(name)
        if tuple(out.shape[1:]) != entry.shape[1:] or first + out.shape[0] > entry.shape[0]:
            rows = f"rows {first} to {first + out.shape[0]} of {list(out.shape)}"
            raise ModelError(f"{entry.file.path}: tensor {name} has shape {list(entry.shape)}, not {rows}")
        skipped = first * math.prod(entry.shape[1:]) * entry.dtype.itemsize
        self._read(name, entry, entry.start + skipped, out)

    def _read(self, name: str, entry: _Entry, position: int, out: Tensor) -> None:
        castable = entry.dtype.is_floating_point and out.dtype.is_floating_point
        if entry.dtype != out.dtype and not castable:
            types = f"{entry.dtype}, which does not turn into {out.dtype}"
            raise ModelError(f"{entry.file.path}: tensor {name} has dtype {types}")
        if not out.numel():
            return
        for part in out.view(-1).split(STEP // entry.dtype.itemsize):
            size = part.numel() * entry.dtype.itemsize
            part.copy_(torch.from_numpy(entry.file.copy(position, size)).view(entry.dtype))
            position += size

    def close(self) -> None:
        """Unmap all files."""
        for file in self._files:
            file.close()

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise ModelError(f"{self.where}: the tensor {name} is missing")
        return self._entries[name]


def _shards(folder: Path) -> dict[str, list[str] | None]:
    """The files of a folder, and which tensors to take from each (None: all)."""
    index = folder / INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index}: has no weight_map")
        shards: dict[str, list[str] | None] = {}
        for name, shard in weight_map.items():
            if Path(shard).name != shard:
                raise ModelError(f"{index}: {name} lies in {shard!r}, which is not a plain file name")
            listed = shards.setdefault(shard, [])
            assert listed is not None
            listed.append(name)
        missing = sorted(shard for shard in shards if not (folder / shard).is_file())
        if missing:
            raise ModelError(f"{folder}: shards of {INDEX} are missing: {', '.join(missing)}")
        return shards
    if (folder / SINGLE).is_file():
        return {SINGLE: None}
    if found := sorted(path.name for path in folder.glob(MODELSLIM)):
        return dict.fromkeys(found)
    if list(folder.glob("*.bin")) or list(folder.glob("*.pth")):
        raise ModelError(
            f"{folder}: pickled weights (.bin, .pth) are not read, since a pickle can run code; "
            "save the model again with save_pretrained, which writes safetensors"
        )
    raise ModelError(f"{folder}: has no weights: neither {SINGLE} nor {INDEX}")


def _read_header(file: MappedFile) -> dict[str, _Entry]:
    """8 bytes with the length of the header, the header in JSON, then the tensors."""
    damaged = f"{file.path}: not a safetensors file, or damaged"
    if file.size < 8:
        raise ModelError(f"{damaged}: it has only {file.size} bytes")
    length = int.from_bytes(file.copy(0, 8).tobytes(), "little")
    if length > file.size - 8:
        raise ModelError(f"{damaged}: its header would take {length} bytes, the file has {file.size}")
    try:
        header = parse_json(file.copy(8, length).tobytes())
        items = [(name, value) for name, value in header.items() if name != "__metadata__"]
        return {name: _entry(file, 8 + length, name, value) for name, value in items}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{damaged}: its header cannot be read ({error})") from error


def _entry(file: MappedFile, base: int, name: str, value: dict[str, Any]) -> _Entry:
    stated, shape = value["dtype"], tuple(int(n) for n in value["shape"])
    begin, end = (int(n) for n in value["data_offsets"])
    if stated not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise ModelError(f"{file.path}: tensor {name} is of dtype {stated}, which is not supported: {known}")
    if end - begin != math.prod(shape) * _DTYPES[stated].itemsize or begin < 0:
        raise ModelError(
            f"{file.path}: damaged: tensor {name} of shape {list(shape)} has {end - begin} bytes"
        )
    if base + end > file.size:
        raise ModelError(
            f"{file.path}: truncated: tensor {name} ends at byte {base + end}, the file has {file.size}"
        )
    return _Entry(file, _DTYPES[stated], shape, base + begin)
