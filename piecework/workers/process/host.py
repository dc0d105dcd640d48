"""What runs inside a child process, and what it is made from."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Context(NamedTuple):
    """What a host is made from: the worker's name, its generation, and the options that its parent sent."""

    name: str
    generation: int
    options: bytes


class Host(Protocol):
    """What a child process is for. `info` goes to the parent with READY."""

    info: bytes

    def handle(self, method: str, body: bytes, fds: tuple[int, ...]) -> bytes:
        """Answer one call; the file descriptors are the host's from now on."""
        ...

    def close(self) -> None:
        """Let go of everything; nothing is called after that."""
        ...
