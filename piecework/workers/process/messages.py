"""What parent and child tell each other; msgspec writes and reads it, by the types in here."""

from __future__ import annotations

import functools
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar, cast

from piecework.errors import ConfigError

T = TypeVar("T")


class Kind(IntEnum):
    """Says what the body of a frame is."""

    START = 1
    READY = 2
    FAILED = 3
    CALL = 4
    REPLY = 5
    CALL_FAILED = 6
    LOG = 7


class Start(NamedTuple):
    """The first message to a child: `target` (`module:name`) is called to make its host."""

    name: str
    generation: int
    target: str
    options: bytes
    log_level: int


class Fault(NamedTuple):
    """An exception on its way to another process; `values` make it anew where its class is known there."""

    kind: str
    message: str
    values: tuple[Any, ...]
    traceback: str


class Call(NamedTuple):
    """A request to the host. One of another generation is refused."""

    id: int
    generation: int
    method: str
    body: bytes


class Reply(NamedTuple):
    """What the host's method returned."""

    id: int
    body: bytes


class CallFailed(NamedTuple):
    """What the host's method raised."""

    id: int
    fault: Fault


class Record(NamedTuple):
    """A log record of the child."""

    logger: str
    level: int
    text: str


def need_msgspec() -> None:
    """Raise ConfigError where msgspec is not installed, before a process is started for nothing."""
    try:
        import msgspec  # noqa: F401
    except ImportError as error:
        raise ConfigError("workers", "process", "inline, as the package msgspec is not installed") from error


@functools.cache
def _encoder() -> Any:
    import msgspec

    return msgspec.msgpack.Encoder()


@functools.cache
def _decoder(kind: Any) -> Any:
    import msgspec

    return msgspec.msgpack.Decoder(kind)


def plain(text: str) -> str:
    """Return text as MessagePack can hold it: half characters, as of file names, are written as escapes."""
    return text.encode(errors="backslashreplace").decode()


def encode(message: Any) -> bytes:
    """Write a message of this package's types, or plain values, as MessagePack."""
    return cast(bytes, _encoder().encode(message))


def decode(kind: type[T], data: bytes) -> T:
    """Read a message of `kind`; raises msgspec's DecodeError for anything else."""
    return cast(T, _decoder(cast(Any, kind)).decode(data))
