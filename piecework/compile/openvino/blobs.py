"""Compiled models on disk, under everything that they depend on."""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from piecework.compile.base import CompileContext, first_line
from piecework.compile.cache import PieceCache, StaleEntryError, content_key
from piecework.compile.openvino.settings import target_of
from piecework.devices.openvino import core, identity
from piecework.graph.fold import structure

log = logging.getLogger("piecework.compile")
FOLDER = "openvino"


def blob_key(
    piece: fx.GraphModule,
    context: CompileContext,
    properties: Mapping[str, Any],
    constants: Mapping[int, Tensor],
    tokens: int | None,
) -> str:
    """Hash what a compiled model depends on.

    The piece, the converters (this package's sources), sizes, the weights inside, the device with its driver,
    OpenVINO's version, and the hints.
    """
    from piecework.graph.stored import sources_digest  # it imports compilers

    return content_key(
        {
            "compiler": "openvino",
            "package": sources_digest(),
            "graph": structure(piece.graph),
            "tokens": tokens,
            "weights": {str(i): _digest(x) for i, x in constants.items()},
            "device": identity(target_of(context)),
            "properties": {name: str(value) for name, value in properties.items()},
        }
    )


def load(cache: PieceCache, key: str, target: str, properties: Mapping[str, Any]) -> Any | None:
    """Return the compiled model of this key, or None; one that can't be used is told in the log."""
    try:
        found = cache.load(key)
        if found is None:
            return None
        path, _ = found
        try:
            return core().import_model(io.BytesIO(path.read_bytes()), target, dict(properties))
        except (RuntimeError, OSError) as error:
            raise StaleEntryError(path, first_line(error)) from error
    except StaleEntryError as error:
        log.warning("%s; the piece is compiled again", error)
        return None


def store(cache: PieceCache, key: str, compiled: Any) -> None:
    """Keep a compiled model; a device that exports none, or a full disk, is told in the log."""

    def write(path: Path) -> None:
        blob = compiled.export_model()
        path.write_bytes(blob if isinstance(blob, bytes) else blob.getvalue())

    try:
        cache.store(key, write, {})
    except (RuntimeError, OSError) as error:
        log.warning("a compiled piece is not kept on disk: %s", first_line(error))


def _digest(x: Tensor) -> str:
    flat = x.detach().contiguous().view(-1).view(torch.uint8) if x.numel() else x.view(-1)
    return hashlib.sha256(flat.numpy().data).hexdigest()
