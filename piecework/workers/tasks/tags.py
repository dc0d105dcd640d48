"""What a task does to each of its tensors, as its function declares it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Tag(Enum):
    """The direction of a tensor parameter; it decides what a task waits for and who waits for the task."""

    INPUT = "input"
    """Read."""
    INOUT = "inout"
    """Read and changed, such as a KV cache."""
    OUTPUT = "output"
    """Written as a whole into memory that the runtime allocates; nothing can be there to wait for."""
    OUTPUT_EXISTING = "output_existing"
    """The caller's memory, written as a whole: what was in it is not needed, only out of the way."""
    NO_DEP = "no_dep"
    """Not looked at: the caller knows why."""

    @property
    def reads(self) -> bool:
        """Whether the task needs what producers before it made."""
        return self in (Tag.INPUT, Tag.INOUT)

    @property
    def writes(self) -> bool:
        """Whether the task is a producer of the tensor."""
        return self in (Tag.INOUT, Tag.OUTPUT, Tag.OUTPUT_EXISTING)


@dataclass(frozen=True)
class Parameter:
    """One parameter of a function: a tensor with a tag, or a scalar, which has none."""

    name: str
    tag: Tag | None = None
