"""Tensor parallelism: rank 0 starts a process for each other rank, and hands on what it is told to run.

The ranks are one worker. When one ends or fails, the others can't go on, since they wait for its part of
a sum; so rank 0 ends, and all others with it, and whoever started rank 0 hears of a death.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from piecework.config import EngineConfig
from piecework.config.processors import usable_processors
from piecework.devices.registry import numbered_device
from piecework.errors import DeviceError
from piecework.models.shard import Shard
from piecework.runner.ranks import HOST, Ranks, collectives_of, join
from piecework.workers.process.host import Context
from piecework.workers.process.messages import encode
from piecework.workers.process.process import ChildProcess, Plan
from piecework.workers.process.reap import close_all
from piecework.workers.serving.steps import ServingOptions

TARGET = "piecework.workers.serving.host:ServingHost"
_CAUSE = 0.5  # seconds until the end of another rank is known, where a sum has told of it already
_GRACE = 10.0  # seconds that rank 0 gets to fail at its start as another rank did, which says more
_CLOSE_SECONDS = 3.0
_EXIT_CODE = 1


def end_process(reason: str) -> NoReturn:
    """End this process, from any thread, with `reason` as its last words, which its parent passes on."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{reason}\n")
        sys.stderr.flush()
    os._exit(_EXIT_CODE)


class Store:
    """The file through which ranks find each other; in memory, without a name, where the system can."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir():
            # Open as long as this process lives: NCCL goes on looking into it.
            self.path = f"/proc/{os.getpid()}/fd/{os.memfd_create('piecework-ranks')}"
        else:
            self._folder = tempfile.TemporaryDirectory(prefix="piecework-ranks-")
            self.path = str(Path(self._folder.name) / "store")

    def close(self) -> None:
        """Remove a file that has a name; everybody must have joined."""
        if self._folder is not None:
            self._folder.cleanup()


class OtherRanks:
    """The processes of the ranks above 0, as rank 0 sees them. It ends when one of them does."""

    def __init__(
        self,
        context: Context,
        options: ServingOptions,
        config: EngineConfig,
        end: Callable[[str], object] = end_process,
    ) -> None:
        """Start them; they load while this process does.

        Args:
            options: those of rank 0.
            end: is told, from some thread, why rank 0 must end.
        """
        self._end = end
        self._closing = threading.Event()
        self._started = threading.Event()
        self._timeout = config.worker.step_timeout or config.worker.start_timeout
        self.store = Store()
        self.ranks = [
            ChildProcess(
                Plan(
                    f"{context.name} rank {rank}",
                    TARGET,
                    encode(options._replace(rank=rank, store=self.store.path)),
                    config.worker.start_timeout + config.worker.compile_timeout,
                ),
                context.generation,
                self._ended,
            )
            for rank in range(1, config.worker.tensor_parallel_size)
        ]

    def wait(self) -> tuple[int, ...]:
        """Wait until all are ready, and return their process ids; raises what a start failed with."""
        for rank in self.ranks:
            rank.ready.result()
        self._started.set()
        self.store.close()
        return tuple(rank.pid for rank in self.ranks if rank.pid is not None)

    def send(self, method: str, body: bytes) -> None:
        """Hand a call on to all, and wait for nobody: each has its part in the sums of this rank's own."""
        try:
            for rank in self.ranks:
                rank.call(method, body, timeout=self._timeout)
        except DeviceError as error:  # it has just ended
            self._end(str(error))

    def wait_for_cause(self) -> None:
        """Before rank 0 ends for a failure of its own: that of a sum is mostly the death of another rank.

        Whoever attends to that rank knows why it died, and ends this process with those words.
        """
        self._closing.wait(_CAUSE)

    def shut_down(self) -> None:
        """Let them end, and wait for nobody."""
        self._closing.set()
        for rank in self.ranks:
            rank.shut_down()

    def close(self) -> None:
        """Wait for their end, and make those end that don't."""
        self.shut_down()
        close_all(self.ranks, _CLOSE_SECONDS)

    def _ended(self, rank: ChildProcess) -> None:
        if self._closing.is_set():
            return
        if not self._started.is_set() and self._closing.wait(_GRACE):
            return
        failed = rank.ready.exception()  # it is done, since the rank has ended
        self._end(f"{rank.name} failed to start: {failed}" if failed else f"{rank.lost}")


def join_ranks(
    config: EngineConfig, options: ServingOptions, others: OtherRanks | None
) -> tuple[EngineConfig, str, Ranks]:
    """Join the group that `options` name, on rank 0 that of `others`.

    Returns the rank's own settings, the name of its device, and the group. Raises ConfigError for a device
    that has no sums over several of its kind.
    """
    shard = Shard(options.rank, config.worker.tensor_parallel_size)
    store = others.store.path if others is not None else options.store
    assert store is not None, "rank 0 makes one"
    own = rank_config(config, options.device, shard)
    timeout = config.worker.start_timeout + config.worker.compile_timeout
    ranks = join(store, shard, collectives_of(options.device), timeout)
    place = config.device.devices.index(options.device)
    return own, own.device.devices[place], ranks


def rank_config(config: EngineConfig, name: str, shard: Shard) -> EngineConfig:
    """Return the settings of a rank on the device `name` of `config.device`.

    Devices with numbers are taken one after the other; ranks on the host share its cores.
    """
    device = config.device
    if collectives_of(name) == HOST:
        threads = device.threads or max(1, usable_processors() // shard.size)
        return replace(config, device=replace(device, threads=threads))
    own = numbered_device(name, shard.rank)
    return replace(
        config,
        device=replace(device, device=",".join(own if one == name else one for one in device.devices)),
    )
