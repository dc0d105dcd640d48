"""One child process as its parent sees it: calls go in, futures come back, and its end is an event."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from math import inf

from piecework.errors import WorkerLostError
from piecework.profile import now
from piecework.workers.process.faults import raised
from piecework.workers.process.messages import (
    Call,
    CallFailed,
    Fault,
    Kind,
    Record,
    Reply,
    Start,
    decode,
    encode,
    need_msgspec,
)
from piecework.workers.process.pending import Pending
from piecework.workers.process.spawn import Spawned, spawn
from piecework.workers.process.turns import Turns
from piecework.workers.process.wire import Frame

log = logging.getLogger("piecework.workers")

_POLL = 0.02  # seconds between looks at a child that ends, where the system has no pidfd
_LATE = 1.0  # seconds after which a sleep was too long: this process was stopped, or had no time
_LAST_WORDS = 2.0  # seconds that a child which closed its channel gets to end by itself


@dataclass(frozen=True)
class Plan:
    """What to start: the worker's name, `target` (`module:name`) that makes its host, and its options.

    `start_timeout` are the seconds until READY, None for as long as it takes.
    """

    name: str
    target: str
    options: bytes = b""
    start_timeout: float | None = 60.0


class ChildProcess:
    """Starts at once. A thread of its own attends to it, and lives as long as the child does.

    Attributes:
        ready: gives the host's info, or the error that the start failed with.
        ended: is set when the child has been waited for and everything of it is closed.
        lost: why it ended, None while it lives.
    """

    def __init__(
        self, plan: Plan, generation: int = 0, on_end: Callable[[ChildProcess], None] = lambda child: None
    ) -> None:
        need_msgspec()
        self.name = plan.name
        self.generation = generation
        self.ended = threading.Event()
        self.lost: WorkerLostError | None = None
        self._on_end = on_end
        self._pending = Pending()
        self._start, self.ready, _ = self._pending.add(plan.start_timeout)
        self._spawned: Spawned | None = None
        self._turns: Turns | None = None
        self._lock = threading.Lock()  # around signals and the end, after which the pid is another's
        self._closing = False
        self._silence: str | None = None
        self._wakes_at = -inf
        self._wake_end, self._waker = os.pipe()
        first = Start(plan.name, generation, plan.target, plan.options, _log_level())
        self._thread = threading.Thread(
            target=self._attend, args=(first,), name=f"piecework-worker-{plan.name}", daemon=True
        )
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """The process's id, None before there is one; it stays when the process has ended."""
        return None if self._spawned is None else self._spawned.process.pid

    def call(
        self, method: str, body: bytes = b"", *, timeout: float | None = None, fds: Sequence[int] = ()
    ) -> Future[bytes]:
        """Ask the host; calls are answered in order. Raises DeviceError where the child takes none.

        A call without an answer after `timeout` seconds means that the child hangs: it is killed, and all
        its calls fail.
        """
        if self._spawned is None:
            raise WorkerLostError(self.name, "has not started yet", point="start")
        number, future, deadline = self._pending.add(timeout)
        if deadline < self._wakes_at:
            self._wake()
        try:
            body = encode(Call(number, self.generation, method, body))
            if not self._spawned.channel.post(Kind.CALL, body, fds):
                self._wake()
        except ConnectionError:  # it is gone; whoever attends to it will say why
            log.debug("a call to %s could not be sent", self.name)
        except BaseException:
            self._pending.withdraw(number)  # else its deadline would come, and be held against the child
            if self.lost is not None:
                raise self.lost from None
            raise
        return future

    def ask(self, method: str, body: bytes = b"", *, timeout: float | None = None) -> bytes:
        """Call the host and wait for its answer, which this thread reads itself if it can; see `call`."""
        spawned, turns = self._spawned, self._turns
        if spawned is None or turns is None or not turns.take():
            return self.call(method, body, timeout=timeout).result()
        try:  # the turn comes first: the answer may be here before the call is over
            future = self.call(method, body, timeout=timeout)
            self._receive_until(future, spawned)
        finally:
            turns.give()
        return future.result()

    def answer(self, future: Future[bytes]) -> bytes:
        """Wait for the answer to a call that was sent before, and read it as `ask` does."""
        spawned, turns = self._spawned, self._turns
        if spawned is not None and turns is not None and not future.done() and turns.take():
            try:
                self._receive_until(future, spawned)
            finally:
                turns.give()
        return future.result()

    def shut_down(self) -> None:
        """Take no calls any more; the child answers those that it has, and ends. Cannot be taken back."""
        self._closing = True
        self._pending.refuse(WorkerLostError(self.name, "is closed", point="close"))
        with self._lock:
            if self._spawned is not None and not self.ended.is_set():
                self._spawned.channel.end()

    def signal(self, number: signal.Signals) -> None:
        """Send the child a signal, unless it has ended."""
        with self._lock:
            if self._spawned is None or self.ended.is_set():
                return
            with contextlib.suppress(ProcessLookupError):
                if self._spawned.pidfd is not None:
                    signal.pidfd_send_signal(self._spawned.pidfd, number)
                else:
                    self._spawned.process.send_signal(number)

    def _attend(self, first: Start) -> None:
        try:
            spawned = spawn()
        except Exception as error:
            self._lose(WorkerLostError(self.name, f"could not be started: {error}", point="start"))
            return
        with self._lock:
            self._spawned = spawned
        with contextlib.suppress(OSError):
            spawned.channel.post(Kind.START, encode(first))
        if self._closing:  # nobody could tell it before
            self.signal(signal.SIGTERM)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(spawned.channel, selectors.EVENT_READ)
                selector.register(spawned.output.pipe, selectors.EVENT_READ)
                selector.register(self._wake_end, selectors.EVENT_READ)
                if spawned.pidfd is not None:
                    selector.register(spawned.pidfd, selectors.EVENT_READ)
                self._turns = Turns(selector, spawned.channel)
                self._watch(spawned, selector, self._turns)
        except Exception as error:  # without this thread nobody would hear of anything any more
            log.exception("the worker %s can't be attended to", self.name)
            self._silence = f"can't be attended to ({type(error).__name__}: {error}) and has been killed"
            self.signal(signal.SIGKILL)
            spawned.channel.cut()
            with contextlib.suppress(subprocess.TimeoutExpired):
                spawned.process.wait(_LAST_WORDS)
        self._lose(self._why(spawned))

    def _watch(self, spawned: Spawned, selector: selectors.BaseSelector, turns: Turns) -> None:
        """Return when the child has ended and been waited for."""
        talks, exited, kill_at = True, False, inf
        while not exited:
            if now() >= min(kill_at, self._pending.next_deadline()):
                self._silence = self._silence or "was silent beyond its deadline and has been killed"
                self.lost = WorkerLostError(self.name, f"{self._who} {self._silence}")
                self._pending.fail_all(self.lost)
                self.signal(signal.SIGKILL)
                spawned.channel.cut()  # whoever reads must not wait for a child that can't be killed
                kill_at = now() + _LAST_WORDS
            polls = spawned.pidfd is None and not talks
            turns.watch_writing(talks and spawned.channel.unsent)
            for key, events in self._sleep(selector, _POLL if polls else self._until(kill_at)):
                if events & selectors.EVENT_WRITE:
                    with contextlib.suppress(OSError):  # it is gone, and will be read to its end
                        spawned.channel.flush()
                if not events & selectors.EVENT_READ:
                    continue
                if key.fileobj is spawned.channel and not self._attend_channel(spawned, turns):
                    selector.unregister(spawned.channel)
                    talks = False
                    kill_at = min(kill_at, inf if self._closing else now() + _LAST_WORDS)
                elif key.fileobj == spawned.output.pipe and not spawned.output.read():
                    selector.unregister(spawned.output.pipe)
                elif key.fileobj == self._wake_end:
                    os.read(self._wake_end, 64)
                elif key.fileobj == spawned.pidfd:
                    exited = True
            exited = (exited or polls) and spawned.process.poll() is not None
        turns.watch_writing(False)
        spawned.channel.cut()
        turns.attend(wait=True)
        try:
            while talks and self._receive(spawned, wait=False):
                pass
        finally:
            turns.leave(last=True)
        spawned.output.read_rest()

    def _sleep(
        self, selector: selectors.BaseSelector, seconds: float | None
    ) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for events. When we were stopped meanwhile, that time doesn't count against the child."""
        begin = now()
        events = selector.select(seconds)
        slept = now() - begin
        if seconds is not None and slept - seconds > _LATE:
            self._pending.postpone(slept)
        return events

    def _attend_channel(self, spawned: Spawned, turns: Turns) -> bool:
        """Take what the child sent, unless a caller does; False when it will send nothing more."""
        if not turns.attend():
            return True
        talks = True
        try:
            talks = self._receive(spawned, wait=False, nothing=True)
        finally:
            turns.leave(last=not talks)
        return talks

    def _until(self, kill_at: float) -> float | None:
        """Seconds to sleep. An old deadline is slept for too: calls of later ones need not wake us then."""
        old, self._wakes_at = self._wakes_at, inf
        target = min(kill_at, self._pending.next_deadline())
        if target == inf and old > now():
            target = old
        self._wakes_at = target
        return None if target == inf else max(0.0, target - now())

    def _receive_until(self, future: Future[bytes], spawned: Spawned) -> None:
        while not future.done() and self._receive(spawned):
            pass

    def _receive(self, spawned: Spawned, *, wait: bool = True, nothing: bool = False) -> bool:
        """Take what the child sent; False at the end, and `nothing` where nothing is there."""
        try:
            frames = spawned.channel.frames(wait=wait)
        except EOFError:
            return False
        except BlockingIOError:
            return nothing
        for frame in frames:
            self._take(frame)
        return True

    def _take(self, frame: Frame) -> None:
        match frame.kind:
            case Kind.REPLY:
                reply = decode(Reply, frame.body)
                self._pending.resolve(reply.id, reply.body)
            case Kind.CALL_FAILED:
                failed = decode(CallFailed, frame.body)
                self._pending.reject(failed.id, raised(failed.fault, self.name))
            case Kind.READY:
                self._pending.resolve(self._start, frame.body)
            case Kind.FAILED:
                self._pending.reject(self._start, raised(decode(Fault, frame.body), self.name))
            case Kind.LOG:
                name, level, text = decode(Record, frame.body)
                logger = logging.getLogger(name)
                logger.handle(logger.makeRecord(name, level, self.name, 0, text, (), None))

    @property
    def _who(self) -> str:
        return f"{self.name} (process {self.pid}, generation {self.generation})"

    def _why(self, spawned: Spawned) -> WorkerLostError:
        code = spawned.process.returncode
        if self._silence:
            reason = self._silence
        elif code < 0:
            reason = f"was killed by {signal.Signals(-code).name}"
        else:
            reason = f"ended with exit code {code}"
        point = "run" if self.ready.done() else "start"
        tail = spawned.output.tail
        return WorkerLostError(self.name, f"{self._who} {reason}", exit_code=code, stderr=tail, point=point)

    def _lose(self, error: WorkerLostError) -> None:
        self.lost = error
        self._pending.fail_all(error)
        if self._turns is not None:
            self._turns.close()
        with self._lock:
            try:
                if self._spawned is not None:
                    self._spawned.close()
                os.close(self._wake_end)
                os.close(self._waker)
            finally:
                self.ended.set()  # last: who waits for it may count what is open
        self._on_end(self)

    def _wake(self) -> None:
        with self._lock:
            if not self.ended.is_set():
                os.write(self._waker, b"!")


def _log_level() -> int:
    return logging.getLogger("piecework").getEffectiveLevel()
