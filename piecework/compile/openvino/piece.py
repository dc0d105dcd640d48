"""A piece that runs as models of OpenVINO, on tensors that it shares with torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from piecework.compile.base import CompileContext, write_results
from piecework.compile.openvino.convert import Converted, Given, Made, dims
from piecework.compile.openvino.settings import Layout
from piecework.compile.openvino.tensors import shared
from piecework.devices.openvino import reason
from piecework.errors import DeviceError
from piecework.graph.symbols import expression

NAME = "openvino"
OPEN = -1


class Model:
    """A compiled model with a request of its own. Threads take turns."""

    def __init__(
        self, compiled: Any, converted: Converted, device: str, weights: frozenset[tuple[int, int]]
    ) -> None:
        """`weights`: positions and addresses of the inputs that come again and again."""
        self.compiled = compiled
        self._converted = converted
        self._device = device
        self._weights = weights
        self._request = compiled.create_infer_request()
        self._lock = threading.Lock()
        self._seen: dict[tuple[int, int], Any] = {}

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Run on a piece's inputs; results are written into `outputs`, contiguous tensors."""
        with self._lock:
            for index, position in enumerate(self._converted.parameters):
                self._request.set_input_tensor(index, self._wrap(position, inputs[position]))
            for index, y in enumerate(outputs):
                self._request.set_output_tensor(index, shared(y))
            try:
                self._request.infer()
            except RuntimeError as error:
                raise DeviceError(self._device, "run", reason(error)) from error

    def _wrap(self, position: int, x: Tensor) -> Any:
        """x as OpenVINO's; weights are wrapped once. What is wrapped keeps the tensor alive."""
        key = position, x.data_ptr()
        if key not in self._weights:
            return shared(x.contiguous())
        if key not in self._seen:
            self._seen[key] = shared(x.contiguous())
        return self._seen[key]


@dataclass(frozen=True)
class _Size:
    """A result of `shape`, with OPEN for the number of tokens."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def at(self, tokens: int) -> tuple[int, ...]:
        return tuple(tokens if size == OPEN else size for size in self.shape)


class OpenVinoPiece:
    """See the module and CompiledPiece.

    `make(constants, tokens)` compiles a model; `constants` are weights by the position of their input.
    """

    opaque = True
    compiler = NAME

    def __init__(
        self,
        piece: fx.GraphModule,
        context: CompileContext,
        layout: Layout,
        place: tuple[int, int] | None,
        make: Callable[[Mapping[int, Tensor], int | None], tuple[Model, Converted]],
    ) -> None:
        self._make = make
        self._context = context
        self._place = place
        self._fixed = layout.sizes == "fixed" and place is not None
        calls = context.calls
        weights = [i for i, _ in enumerate(calls[0]) if all(c[i] is not None for c in calls)] if calls else []
        self._constants = tuple(weights) if layout.weights == "constants" else ()
        values = [n.meta["val"] for n in piece.graph.find_nodes(op="placeholder")]
        self._growing = [i for i, val in enumerate(values) if any(expression(s).is_Symbol for s in val.shape)]
        self._models: dict[tuple[tuple[int, ...], int | None], Model] = {}
        self._lock = threading.Lock()
        self._start(calls)
        (output,) = piece.graph.find_nodes(op="output")
        results = [node.meta["val"] for node in output.args[0]]
        self._sizes = [_Size(tuple(dims(val, None)), val.dtype) for val in results]
        self.direct = not self._fixed and all(isinstance(r, Made) for r in self._results)
        """Whether results are written into given outputs at once."""

    @property
    def models(self) -> int:
        """How many models there are of it."""
        return len(self._models)

    def _start(self, calls: Sequence[Sequence[Tensor | None]]) -> None:
        """Compile a model for each call, at one token where sizes are fixed: larger ones come when needed."""
        wanted: dict[tuple[int, ...], dict[int, Tensor]] = {}
        for call in calls if self._constants else [()]:
            chosen = {i: x for i in self._constants if (x := call[i]) is not None}
            wanted[tuple(x.data_ptr() for x in chosen.values())] = chosen
        size = 1 if self._fixed else None
        with ThreadPoolExecutor(max(1, torch.get_num_threads()), thread_name_prefix="openvino") as pool:
            made = list(pool.map(lambda constants: self._make(constants, size), wanted.values()))
        for key, (model, converted) in zip(wanted, made, strict=True):
            self._models[key, size] = model
            self._results = converted.results
        self.source = describe(made[0][0].compiled)

    def __call__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None) -> Sequence[Tensor]:
        """Run; see CompiledPiece. An error of the device is a DeviceError at the point `run`."""
        tokens = 0 if self._place is None else inputs[self._place[0]].shape[self._place[1]]
        rows = 1 << (tokens - 1).bit_length() if self._fixed else tokens
        size = rows if self._fixed else None
        key = tuple([inputs[i].data_ptr() for i in self._constants]), size
        model = self._models.get(key) or self._later(inputs, key)
        given = inputs
        if rows != tokens:
            given = [padded(x, rows) if i in self._growing else x for i, x in enumerate(inputs)]
        if outputs is not None and self.direct and self._fit(outputs, tokens):
            model.run(given, outputs)
            return outputs
        made = [
            torch.empty(s.at(rows), dtype=s.dtype)
            for s, r in zip(self._sizes, self._results, strict=True)
            if isinstance(r, Made)
        ]
        model.run(given, made)
        results: list[Tensor] = []
        for s, result in zip(self._sizes, self._results, strict=True):
            if isinstance(result, Given):
                results.append(inputs[result.position])
            elif isinstance(result, Made):
                y = made[result.index]
                results.append(y[:tokens] if rows != tokens and OPEN in s.shape else y)
            else:
                results.append(torch.empty(s.at(tokens), dtype=s.dtype))
        return results if outputs is None else write_results(results, outputs)

    def _later(self, inputs: Sequence[Tensor], key: tuple[tuple[int, ...], int | None]) -> Model:
        """Compile for a size that came for the first time.

        For weights that no call has, as those of a piece that moved here, there is one model that takes them.
        """
        weights, size = key
        known = any(found == weights for found, _ in self._models)
        constants = {i: inputs[i] for i in self._constants} if known else {}
        place = (weights if known else (), size)
        with self._lock:
            if place not in self._models:
                self._context.counters.add("compiles" if known else "recompiles")
                self._models[place], _ = self._make(constants, size)
            return self._models[place]

    def _fit(self, outputs: Sequence[Tensor], tokens: int) -> bool:
        return all(
            y.shape == s.at(tokens) and y.dtype is s.dtype and y.is_contiguous()
            for y, s in zip(outputs, self._sizes, strict=True)
        )


def padded(x: Tensor, rows: int) -> Tensor:
    """Return x with rows of zeros behind it."""
    out = x.new_zeros((rows, *x.shape[1:]))
    out[: x.shape[0]] = x
    return out


def describe(compiled: Any) -> str:
    """Return the operations that the device runs, one a line; empty where its plug-in doesn't tell."""
    try:
        nodes = compiled.get_runtime_model().get_ordered_ops()
    except RuntimeError:
        return ""
    lines = []
    for node in nodes:
        info = node.get_rt_info()
        kind, way = (
            info[name].astype(str) if name in info else "" for name in ("layerType", "primitiveType")
        )
        shapes = ", ".join(str(out.get_partial_shape()) for out in node.outputs())
        lines.append(f"{kind or node.get_type_name()} {shapes} {way}".rstrip())
    return "\n".join(lines)
