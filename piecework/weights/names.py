"""Which of a checkpoint's weights make up a parameter of the model, and where in it they go."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from piecework.errors import ModelError

# Weights of a checkpoint that a model may do without: old checkpoints save the rotary frequencies.
HARMLESS = (re.compile(r"(.*\.)?rotary_emb\.inv_freq"),)
# Harmless too where the model has no such parameter, because its head is tied to the embedding.
TIED_HEAD = "lm_head.weight"

# Transformers 5 may save all experts of a layer as one weight under these names, else one for each.
_EXPERTS = {"w13": ("gate_up_proj", ("gate_proj", "up_proj")), "w2": ("down_proj", ("down_proj",))}


@dataclass(frozen=True)
class Piece:
    """The weight `name` of the checkpoint fills rows `first` to `first + count` of a parameter.

    `expert` chooses one matrix of a parameter [E, N, K] before that; None: there is none to choose.
    """

    name: str
    first: int
    count: int
    expert: int | None = None

    def view(self, parameter: Tensor) -> Tensor:
        """The part of the parameter that this weight fills."""
        whole = parameter if self.expert is None else parameter[self.expert]
        return whole[self.first : self.first + self.count]


def pieces_of(
    name: str,
    shape: Sequence[int],
    packed: Mapping[str, Sequence[str]],
    sizes: Sequence[int] | None,
    has: Callable[[str], bool],
) -> list[Piece]:
    """The weights that fill the parameter `name`; together they cover it, each row once.

    Args:
        shape: of the parameter.
        packed: the model's `packed_modules`.
        sizes: rows of each part, where the parameter's module is a packed one.
        has: whether the checkpoint has a weight of a name; some have packed weights or fused experts.
    """
    path = name.split(".")
    if len(path) > 1 and path[-2] == "experts" and path[-1] in _EXPERTS:
        return _experts(name, shape, has)
    if has(name) or len(path) < 2 or path[-2] not in packed:
        return [Piece(name, 0, shape[0])]
    parts = packed[path[-2]]
    if sizes is None or len(sizes) != len(parts) or sum(sizes) != shape[0]:
        raise ModelError(f"{name} {list(shape)} is packed of {', '.join(parts)}, but its sizes are {sizes}")
    stem = "".join(f"{step}." for step in path[:-2])
    firsts = [sum(sizes[:i]) for i in range(len(parts))]
    return [
        Piece(f"{stem}{part}.{path[-1]}", first, size)
        for part, first, size in zip(parts, firsts, sizes, strict=True)
    ]


def _experts(name: str, shape: Sequence[int], has: Callable[[str], bool]) -> list[Piece]:
    stem, _, own = name.rpartition(".")
    fused, parts = _EXPERTS[own]
    if has(f"{stem}.{fused}"):
        return [Piece(f"{stem}.{fused}", 0, shape[0])]
    rows = shape[1] // len(parts)
    return [
        Piece(f"{stem}.{expert}.{part}.weight", i * rows, rows, expert)
        for expert in range(shape[0])
        for i, part in enumerate(parts)
    ]


def is_harmless(name: str, parameters: Mapping[str, Tensor]) -> bool:
    """Whether a weight that no parameter takes may be left out without a word."""
    if name == TIED_HEAD:
        return name not in parameters
    return any(pattern.fullmatch(name) for pattern in HARMLESS)
