"""Open a checkpoint, and fill a model with it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from piecework.errors import ConfigError, ModelError
from piecework.layers.parameter import materialise
from piecework.weights.checkpoint import Checkpoint
from piecework.weights.dummy import DummyCheckpoint
from piecework.weights.folder import read_config, read_generation_config
from piecework.weights.names import Piece, is_harmless, pieces_of
from piecework.weights.sharded import whole_of
from piecework.weights.source import Source

log = logging.getLogger(__name__)

Shapes = tuple[tuple[int, ...], ...]
"""The shapes that a weight of a checkpoint may have."""

LISTED = 50  # names of each kind in one error
THREADS = 4  # that read at once; each has its own few megabytes of working memory


def open_checkpoint(
    source: Source,
    load_format: str = "auto",
    seed: int = 0,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Checkpoint:
    """Open the weights of a source; nothing of them is read yet.

    Args:
        load_format: auto, safetensors, gguf or dummy; dummy takes only the configuration of the source.
        seed: of dummy weights.
        cache_dir: where parsed headers and configurations are kept; see `cache_root`.
    """
    if load_format == "dummy":
        return _dummy(source, seed, cache_dir)
    expected = {"auto": source.kind, "gguf": "gguf", "safetensors": "folder"}.get(load_format)
    if expected != source.kind:
        raise ConfigError("load_format", load_format, f"one that fits the {source.kind} {source.path}")
    if source.kind == "gguf":
        from piecework.weights.gguf.checkpoint import GgufCheckpoint

        return GgufCheckpoint(source.path, cache_dir)
    from piecework.weights.safetensors import SafetensorsCheckpoint

    return SafetensorsCheckpoint(source.path, cache_dir)


def _dummy(source: Source, seed: int, cache_dir: str | os.PathLike[str] | None) -> DummyCheckpoint:
    if source.kind == "folder":
        config, generation = read_config(source.path, cache_dir), read_generation_config(source.path)
        return DummyCheckpoint(config, generation, seed, str(source.path))
    from piecework.weights.gguf.checkpoint import GgufCheckpoint

    real = GgufCheckpoint(source.path, cache_dir)
    real.close()
    return DummyCheckpoint(real.config, real.generation_config, seed, real.where)


def load_weights(
    model: nn.Module,
    checkpoint: Checkpoint,
    taken: Mapping[str, Shapes] = {},
    filled: Callable[[str], None] | None = None,
) -> None:
    """Fill every parameter of `model`, each exactly once, or raise one ModelError that lists all faults.

    The faults are weights that are missing in the checkpoint, that no parameter takes (but for those in
    `piecework.weights.names.HARMLESS` and a tied head), and that have another shape. They are found
    before anything is read. `taken` are weights that the caller reads, and the shapes that each may have.
    `filled` is called, on several threads, with the name of each parameter that has its values. It may put
    another one in its place: one that is on meta until then gets memory, on the CPU, just before it is read.
    """
    plan = _plan(model, checkpoint, taken)

    def fill(name: str) -> None:
        if model.get_parameter(name).is_meta:
            materialise(model.get_submodule(name.rpartition(".")[0]), torch.device("cpu"))
        parameter = model.get_parameter(name).detach()
        for piece in plan[name]:
            checkpoint.read(piece.name, piece.view(parameter))
        if filled is not None:
            filled(name)

    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        for _ in pool.map(fill, plan):
            pass
    log.info("%s: %d weights read", checkpoint.where, sum(map(len, plan.values())))


def _plan(
    model: nn.Module, checkpoint: Checkpoint, taken: Mapping[str, Shapes]
) -> dict[str, Sequence[Piece]]:
    """The weights to read by the names of the parameters that they fill."""
    parameters = dict(model.named_parameters())
    packed: dict[str, tuple[str, ...]] = getattr(model, "packed_modules", {})
    offered = set(checkpoint.names())
    plan: dict[str, Sequence[Piece]] = {}
    wanted: dict[str, Shapes] = {}
    for name, parameter in parameters.items():
        module: Any = model.get_submodule(name.rpartition(".")[0])
        sizes = getattr(module, "sizes", None)
        pieces = pieces_of(name, parameter.shape, packed, sizes, offered.__contains__)
        wanted.update({piece.name: (tuple(piece.view(parameter).shape),) for piece in pieces})
        plan[name] = pieces
    if isinstance(whole_of(checkpoint), DummyCheckpoint):
        return plan
    wanted.update(taken)
    faults = [
        ("missing", [f"{n} {_listed(s)}" for n, s in wanted.items() if n not in offered]),
        (
            "unexpected",
            [
                f"{n} {list(checkpoint.shape(n))}"
                for n in sorted(offered - set(wanted))
                if not is_harmless(n, parameters)
            ],
        ),
        (
            "of another shape",
            [
                f"{n} {list(checkpoint.shape(n))}, the model has {_listed(s)}"
                for n, s in wanted.items()
                if n in offered and checkpoint.shape(n) not in s
            ],
        ),
    ]
    if any(lines for _, lines in faults):
        raise ModelError(_report(checkpoint.where, faults))
    return plan


def _listed(shapes: Shapes) -> str:
    return " or ".join(str(list(shape)) for shape in shapes)


def _report(where: str, faults: list[tuple[str, list[str]]]) -> str:
    text = [f"{where}: the weights do not fit the model:"]
    for kind, lines in faults:
        if lines:
            more = [f"and {len(lines) - LISTED} more"] if len(lines) > LISTED else []
            text.append(f"{len(lines)} {kind}:")
            text.extend(f"  {line}" for line in lines[:LISTED] + more)
    return "\n".join(text)
