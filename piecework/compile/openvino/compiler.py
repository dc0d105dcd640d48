"""The compiler `openvino`: converts a piece, compiles it for its device, and keeps what takes long."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx

from piecework.compile.base import CompileContext, CompileError, NotForCompilerError, token_input
from piecework.compile.cache import PieceCache
from piecework.compile.openvino import aten as aten
from piecework.compile.openvino import floats as floats
from piecework.compile.openvino import integers as integers
from piecework.compile.openvino.blobs import FOLDER, blob_key, load, store
from piecework.compile.openvino.convert import Converted, NotConvertedError, convert
from piecework.compile.openvino.piece import NAME, Model, OpenVinoPiece
from piecework.compile.openvino.settings import Layout, layout, properties, target_of
from piecework.devices.openvino import core, reason
from piecework.errors import DeviceError


class OpenVinoCompiler:
    """See the module. `layout` is another one than the device's own, to measure."""

    name = NAME
    parallel = False  # a piece compiles the models of its calls side by side

    def __init__(self, layout: Layout | None = None) -> None:
        self._layout = layout

    def compile(self, piece: fx.GraphModule, context: CompileContext) -> OpenVinoPiece:
        """Convert and compile.

        Raises:
            NotForCompilerError: the piece has an operation that no converter knows; it is named.
            CompileError: the device refuses the piece.
            DeviceError: the device is gone.
        """
        chosen = self._layout or layout(target_of(context))
        making = _Making(piece, context, chosen)
        try:
            made = OpenVinoPiece(piece, context, chosen, token_input(piece), making.make)
        except NotConvertedError as error:
            raise NotForCompilerError(NAME, str(error)) from error
        context.cached = making.cache is not None and making.hits == made.models
        if context.cached:
            context.counters.add("cache_hits")
        return made


class _Making:
    """Makes the models of one piece. Threads may make several at once."""

    def __init__(self, piece: fx.GraphModule, context: CompileContext, layout: Layout) -> None:
        self._piece = piece
        self._context = context
        self._target = target_of(context)
        self._properties = properties(piece, context)
        folder = context.cache_dir
        self.cache = PieceCache(folder / FOLDER) if folder is not None and layout.kept else None
        self.hits = 0
        self._lock = threading.Lock()
        self._weights = frozenset(
            (i, x.data_ptr()) for call in context.calls for i, x in enumerate(call) if x is not None
        )

    def make(self, constants: Mapping[int, Tensor], tokens: int | None) -> tuple[Model, Converted]:
        """Return a model for `tokens`, None for any number, with these weights in it."""
        converted = convert(self._piece, constants, tokens)
        compiled = self._compiled(converted, constants, tokens)
        return Model(compiled, converted, self._context.device.name, self._weights), converted

    def _compiled(self, converted: Converted, constants: Mapping[int, Tensor], tokens: int | None) -> Any:
        if self.cache is None:
            return self._compile(converted)
        key = blob_key(self._piece, self._context, self._properties, constants, tokens)
        found = load(self.cache, key, self._target, self._properties)
        if found is not None:
            with self._lock:
                self.hits += 1
            return found
        compiled = self._compile(converted)
        store(self.cache, key, compiled)
        return compiled

    def _compile(self, converted: Converted) -> Any:
        try:
            return core().compile_model(converted.model, self._target, self._properties)
        except RuntimeError as error:
            if self._target.partition(".")[0] in {d.partition(".")[0] for d in core().available_devices}:
                raise CompileError(NAME, reason(error)) from error
            raise DeviceError(self._context.device.name, "compile", reason(error)) from error
