"""A checkpoint's folder and its safetensors files, written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from piecework.errors import ConfigError, ModelError
from piecework.weights.safetensors import INDEX, SINGLE

SHARD_BYTES = 2 * 2**30  # of one file, and so most of what is in memory at once


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Give a temporary folder beside `out`; it becomes `out` where the block ends well, else it goes away.

    Raises ConfigError where `out` exists already or can't be made.
    """
    if os.path.lexists(out):  # a link to nowhere is there too, and no folder takes its place
        raise ConfigError("out", str(out), "a folder that doesn't exist yet")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise ConfigError("out", str(out), f"a folder that can be written ({error})") from error
    try:
        yield made
        mask = _umask()
        made.chmod(0o777 & ~mask)  # mkdtemp's own is for this user alone, and so are safetensors' files
        for path in made.iterdir():
            path.chmod(0o666 & ~mask)
        made.rename(out)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class Shards:
    """Tensors on their way into files of at most `limit` bytes, or of one tensor."""

    def __init__(self, folder: Path, limit: int = SHARD_BYTES) -> None:
        self._folder = folder
        self._limit = limit
        self._waiting: dict[str, Tensor] = {}
        self._files: list[list[str]] = []
        self._bytes = self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor; what is waiting goes into a file where both are too much for one."""
        if self._waiting and self._bytes + tensor.nbytes > self._limit:
            self._flush()
        self._waiting[name] = tensor.contiguous()
        self._bytes += tensor.nbytes
        self._total += tensor.nbytes

    def _flush(self) -> None:
        from safetensors.torch import save_file

        path = self._folder / f"part-{len(self._files)}"
        try:
            save_file(self._waiting, path, metadata={"format": "pt"})
        except Exception as error:  # safetensors has an error of its own for a full disk
            raise ModelError(f"{path}: cannot be written ({error})") from error
        self._files.append(list(self._waiting))
        self._waiting, self._bytes = {}, 0

    def finish(self) -> None:
        """Write the last file, name them all, and write the index where there are several."""
        self._flush()
        count = len(self._files)
        names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        if count == 1:
            names = [SINGLE]
        for i, name in enumerate(names):
            (self._folder / f"part-{i}").rename(self._folder / name)
        if count > 1:
            where = {key: name for name, keys in zip(names, self._files, strict=True) for key in keys}
            index = {"metadata": {"total_size": self._total}, "weight_map": where}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
