"""A host that answers what it is asked: for tests of the processes themselves, and to time one hop."""

from __future__ import annotations

from piecework.workers.process.host import Context


class Echo:
    """Imports nothing; its info is its options."""

    def __init__(self, context: Context) -> None:
        self.info = context.options

    def handle(self, method: str, body: bytes, fds: tuple[int, ...]) -> bytes:
        """Return the body."""
        return body

    def close(self) -> None:
        """There is nothing to let go of."""
