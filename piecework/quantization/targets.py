"""Which linears of a model become int8, and what of the checkpoint each is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from piecework.errors import ModelError
from piecework.layers.embedding import Embedding
from piecework.layers.linear import Linear
from piecework.layers.moe import MoE
from piecework.quantization.reader import HEAD, TIED_HEAD, Reader, Scheme
from piecework.weights.names import Piece, pieces_of


@dataclass(frozen=True)
class Part:
    """Rows `first` to `first + count` of a target come from the checkpoint's `linear`."""

    linear: str
    first: int
    count: int


@dataclass(frozen=True)
class Target:
    """A layer of the model, by its name there, that becomes int8; several parts where it is packed.

    It is a linear, or the embedding that is the head too.
    """

    name: str
    module: Linear | Embedding
    scheme: Scheme
    parts: tuple[Part, ...]

    @property
    def bias(self) -> bool:
        """Whether the model has a bias here."""
        return getattr(self.module, "bias", None) is not None


def kept_float(model: nn.Module) -> set[str]:
    """Name the linears that are not quantised unless a checkpoint is so already, or asked: head and routers.

    Both decide between near values. Embeddings and experts are no linears.
    """
    kept = {HEAD}
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            kept.update(f"{name}.{child}" for child, of in module.named_children() if isinstance(of, Linear))
    return kept


def parts_of(model: nn.Module, name: str, module: Linear, has: Callable[[str], bool]) -> tuple[Part, ...]:
    """Return the checkpoint's linears that make up `module`; `has` says whether it has a weight."""
    packed: dict[str, tuple[str, ...]] = getattr(model, "packed_modules", {})
    sizes: Any = getattr(module, "sizes", None)
    pieces: list[Piece] = pieces_of(f"{name}.weight", module.weight.shape, packed, sizes, has)
    return tuple(Part(piece.name.removesuffix(".weight"), piece.first, piece.count) for piece in pieces)


def find_targets(model: nn.Module, reader: Reader, has: Callable[[str], bool], where: str) -> list[Target]:
    """List the linears that `reader` quantises.

    Raises:
        ModelError: the parts of a packed linear differ in their scheme, so that no one product does.
    """
    found: list[Target] = []
    for name, module in model.named_modules():
        if not isinstance(module, Linear):
            continue
        parts = parts_of(model, name, module, has)
        schemes = {part.linear: reader.scheme_of(part.linear) for part in parts}
        if len(set(schemes.values())) > 1:
            listed = ", ".join(f"{linear}: {scheme or 'float'}" for linear, scheme in schemes.items())
            raise ModelError(
                f"{where}: {name} is one product of several linears, which have to share a scheme ({listed})"
            )
        scheme = schemes[parts[0].linear]
        if scheme is not None:
            found.append(Target(name, module, scheme, parts))
    return found


def tied_head(model: nn.Module, reader: Reader) -> list[Target]:
    """List the embedding of a model that has no other head, where `reader` quantises it."""
    table, scheme = model.get_submodule(TIED_HEAD), reader.scheme_of(TIED_HEAD)
    assert isinstance(table, Embedding)
    part = Part(TIED_HEAD, 0, table.weight.shape[0])
    return [] if scheme is None else [Target(TIED_HEAD, table, scheme, (part,))]
