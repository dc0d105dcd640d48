"""What every kind of checkpoint offers to the loader."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Checkpoint(Protocol):
    """Named weights of a model and its configuration, whatever kind of file they are in.

    Names are those of the Hugging Face model (`model.layers.0.self_attn.q_proj.weight`).
    """

    where: str
    """The file or folder, for messages."""

    config: dict[str, Any]
    """The model's configuration as in a Hugging Face config.json, with `architectures`."""

    generation_config: dict[str, Any]
    """As in a Hugging Face generation_config.json; empty where there is none."""

    def names(self) -> list[str]:
        """The names of all weights."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one weight, in torch order; nothing of it is read."""
        ...

    def read(self, name: str, out: Tensor) -> None:
        """Copy one weight into `out` (of the same shape, any float dtype and device), block by block.

        Raises ModelError, naming the file and the weight, where it cannot be read.
        """
        ...

    def close(self) -> None:
        """Close the files."""
        ...
