"""The main program of a child process: makes its host, says READY or FAILED, and answers calls in order.

    python -m piecework.workers.process.child SOCKET DEATH_PIPE PARENT_PID

It ends when its parent says that nothing more will come, or is gone.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator
from importlib import import_module

from piecework.workers.process.faults import fault_of
from piecework.workers.process.host import Context, Host
from piecework.workers.process.messages import (
    Call,
    CallFailed,
    Kind,
    Record,
    Reply,
    Start,
    decode,
    encode,
    plain,
)
from piecework.workers.process.orphans import die_with_parent
from piecework.workers.process.wire import Channel, Frame


def main() -> int:
    """Run until the parent ends the conversation; returns the exit code."""
    end, pipe, parent = map(int, sys.argv[1:4])
    die_with_parent(pipe, parent)
    channel = Channel(socket.socket(fileno=end))
    frames = _frames(channel)
    start = decode(Start, next(frames).body)
    _send_logs(channel, start.log_level)
    try:
        host = _make(start)
    except Exception as error:
        channel.send(Kind.FAILED, encode(fault_of(error)))
        return 1
    channel.send(Kind.READY, host.info)
    for frame in frames:
        call = decode(Call, frame.body)
        try:
            if call.generation != start.generation:
                wrong = f"a call of generation {call.generation} came to generation {start.generation}"
                raise ValueError(wrong)
            answer = host.handle(call.method, call.body, frame.fds)
        except (Exception, SystemExit) as error:  # whoever called exit() ends its call, and not the worker
            channel.send(Kind.CALL_FAILED, encode(CallFailed(call.id, fault_of(error))))
        else:
            channel.send(Kind.REPLY, encode(Reply(call.id, answer)))
    host.close()
    return 0


def _make(start: Start) -> Host:
    module, _, name = start.target.partition(":")
    host: Host = getattr(import_module(module), name)(Context(start.name, start.generation, start.options))
    return host


def _frames(channel: Channel) -> Iterator[Frame]:
    while True:
        try:
            yield from channel.frames()
        except EOFError:
            return


def _send_logs(channel: Channel, level: int) -> None:
    logger = logging.getLogger("piecework")
    logger.setLevel(level)
    logger.propagate = False
    logger.addHandler(_ToParent(channel))


class _ToParent(logging.Handler):
    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = plain(self.format(record))
            self._channel.send(Kind.LOG, encode(Record(plain(record.name), record.levelno, text)))
        except Exception:  # as all handlers do: a record is no reason for its author to fail
            self.handleError(record)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
