"""Frames over a socket pair: the body's length, a kind, and file descriptors beside it."""

from __future__ import annotations

import socket
import struct
import threading
from array import array
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

_HEADER = struct.Struct("<IBB")  # bytes of the body, kind, file descriptors
_CHUNK = 2**16
_MOST_FDS = 64
_FD = array("i")
_ROOM_FOR_FDS = socket.CMSG_LEN(_MOST_FDS * _FD.itemsize)
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class Frame(NamedTuple):
    """One message as it travels; `fds` belong to whoever receives it."""

    kind: int
    body: bytes
    fds: tuple[int, ...] = ()


class Channel:
    """One end of a socket pair. Any thread may send; one thread receives.

    A parent posts: were both ends to wait until the other reads, none would.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()
        self._received = bytearray()
        self._fds: deque[int] = deque()
        self._unsent: deque[tuple[memoryview, tuple[int, ...]]] = deque()

    def fileno(self) -> int:
        """For selectors: readable means that `frames` returns at once."""
        return self._socket.fileno()

    def send(self, kind: int, body: bytes) -> None:
        """Send a frame whole; blocks while the other end doesn't read. Raises OSError where it is gone.

        Not to be mixed with `post`.
        """
        with self._sending:
            self._socket.sendall(_HEADER.pack(len(body), kind, 0) + body)

    def post(self, kind: int, body: bytes, fds: Sequence[int] = ()) -> bool:
        """Send a frame without waiting; False where a part of it is left for `flush`.

        Raises OSError where the other end is gone. The descriptors must stay open until it is sent.
        """
        data = _HEADER.pack(len(body), kind, len(fds)) + body
        with self._sending:
            self._unsent.append((memoryview(data), tuple(fds)))
            return self._flush()

    @property
    def unsent(self) -> bool:
        """Whether something waits for `flush`, which is worth a try when the channel is writable."""
        return bool(self._unsent)

    def flush(self) -> bool:
        """Send more of what was posted; False where something is still left."""
        with self._sending:
            return self._flush()

    def frames(self, *, wait: bool = True) -> list[Frame]:
        """Receive once and return the frames that are complete, which may be none.

        Raises:
            EOFError: the other end is closed.
            BlockingIOError: nothing is there, and `wait` is false.
        """
        flags = _CLOSE_ON_EXEC | (0 if wait else socket.MSG_DONTWAIT)
        try:
            # Not recv_fds, nor send_fds below: in several versions of Python they ignore the flags.
            data, beside, _, _ = self._socket.recvmsg(_CHUNK, _ROOM_FOR_FDS, flags)
        except ConnectionResetError as error:
            raise EOFError from error
        for _, kind, numbers in beside:
            if kind == socket.SCM_RIGHTS:
                whole = len(numbers) // _FD.itemsize * _FD.itemsize
                self._fds.extend(array("i", numbers[:whole]))
        if not data:
            raise EOFError
        self._received += data
        found: list[Frame] = []
        while (frame := self._next()) is not None:
            found.append(frame)
        return found

    def end(self) -> None:
        """Say that nothing more will be sent; the other end reads to the end, and then knows."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:  # it is closed already
            return

    def cut(self) -> None:
        """Receive no more than what is here already: whoever waits for more is told of the end."""
        with suppress(OSError):  # it is closed already
            self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _flush(self) -> bool:
        while self._unsent:
            data, fds = self._unsent.popleft()
            try:
                if fds:
                    beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))]
                    sent = self._socket.sendmsg([data], beside, socket.MSG_DONTWAIT)
                else:
                    sent = self._socket.send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._unsent.appendleft((data, fds))
                return False
            if sent < len(data):
                self._unsent.appendleft((data[sent:], ()))
        return True

    def _next(self) -> Frame | None:
        if len(self._received) < _HEADER.size:
            return None
        length, kind, count = _HEADER.unpack_from(self._received)
        stop = _HEADER.size + length
        if len(self._received) < stop:
            return None
        body = bytes(memoryview(self._received)[_HEADER.size : stop])
        del self._received[:stop]
        return Frame(kind, body, tuple(self._fds.popleft() for _ in range(count)))


def channel_pair() -> tuple[Channel, socket.socket]:
    """Return our end, and the socket that a child makes its own channel of."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel(ours), theirs
