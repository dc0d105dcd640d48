"""Hosts that misbehave, for tests of child processes. None of them imports torch."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time

from piecework.errors import ConfigError
from piecework.workers.process.echo import Echo
from piecework.workers.process.process import ChildProcess, Plan

ECHO = "piecework.workers.process.echo:Echo"


class Trouble(Echo):
    """Does what its method says."""

    def handle(self, method, body, fds):
        match method:
            case "sleep":
                time.sleep(float(body))
            case "raise":
                raise ConfigError("dtype", "int1", "a precision")
            case "value":
                raise ValueError("a value")
            case "exit":
                os._exit(int(body))
            case "write":
                sys.stderr.write(body.decode())
            case "log":
                logging.getLogger("piecework.tiny").warning("said %s", body.decode())
            case "parts":
                return body * 100_000
            case "leave":  # an heir, who has the socket and outlives the child
                if os.fork() == 0:
                    signal.pause()
                return str(os.getpid()).encode()
        return body


class Deaf(Trouble):
    """Ignores SIGTERM."""

    def __init__(self, context):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        super().__init__(context)


class Stubborn(Deaf):
    """Ignores SIGTERM, and never ends by itself."""

    def close(self):
        time.sleep(1000)


class Refuses:
    def __init__(self, context):
        raise ConfigError("dtype", "int1", "a precision")


class Crashes:
    def __init__(self, context):
        sys.stderr.write("the last words\n")
        os._exit(7)


class Sleeps:
    def __init__(self, context):
        time.sleep(1000)


class Nested(Echo):
    """Has a child of its own, and tells its pid."""

    def __init__(self, context):
        self._below = started(ECHO)
        self.info = str(self._below.pid).encode()


def started(target, generation=0, **options):
    """A child of one of these, or of another target, that is ready."""
    child = make(target, generation, **options)
    child.ready.result(60)
    return child


def make(target, generation=0, on_end=lambda child: None, **options):
    name = target if isinstance(target, str) else f"child_hosts:{target.__name__}"
    return ChildProcess(Plan("tiny", name, **options), generation, on_end)
