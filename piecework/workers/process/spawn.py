"""Starts a child: a new interpreter, never a fork of this one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from piecework.workers.process.output import Output
from piecework.workers.process.wire import Channel, channel_pair


@dataclass(frozen=True)
class Spawned:
    """A child and what ties it to us.

    `lifeline` is the end of its death pipe that only we have; `pidfd` is readable once it has ended, None
    where the system has no such thing.
    """

    process: subprocess.Popen[bytes]
    channel: Channel
    output: Output
    lifeline: int
    pidfd: int | None

    def close(self) -> None:
        """Close everything that is open on our side; the child must have been waited for."""
        self.channel.close()
        self.output.close()
        os.close(self.lifeline)
        if self.pidfd is not None:
            os.close(self.pidfd)


def spawn() -> Spawned:
    """Start a child in a process group of its own. The calling thread must live as long as the child.

    It finds modules where this process does. Nothing that is open here is open there, but for the channel
    and the death pipe.
    """
    channel, theirs = channel_pair()
    death_pipe, lifeline = os.pipe()
    output, output_end = os.pipe()
    arguments = [str(number) for number in (theirs.fileno(), death_pipe, os.getpid())]
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "piecework.workers.process.child", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output_end,
            stderr=output_end,
            pass_fds=(theirs.fileno(), death_pipe),
            process_group=0,
            env={**os.environ, "PYTHONPATH": _search_path()},
        )
    except BaseException:
        channel.close()
        os.close(output)
        os.close(lifeline)
        raise
    finally:
        theirs.close()
        os.close(death_pipe)
        os.close(output_end)
    return Spawned(process, channel, Output(output), lifeline, _pidfd(process.pid))


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not in this system, or too many files are open: it is polled then
        return None


def _search_path() -> str:
    return os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
