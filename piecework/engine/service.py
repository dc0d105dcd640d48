"""The engine behind a thread-safe door: one thread runs it, any thread or event loop may submit."""

from __future__ import annotations

import logging
import os
import random
import threading
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any, TypeVar

from piecework import debug
from piecework.config import EngineConfig
from piecework.engine.admission import Admission
from piecework.engine.audited import AuditedRunner, make_audit
from piecework.engine.beside import run_beside
from piecework.engine.carry import Carried
from piecework.engine.engine import Engine
from piecework.engine.gaps import Pauses
from piecework.engine.health import describe
from piecework.engine.loader import Loader
from piecework.engine.observer import Observer
from piecework.engine.orders import Order, carry_out, refuse_own_thread
from piecework.engine.outputs import Delta, EngineStats
from piecework.engine.reference import Reference
from piecework.engine.request import Listener, Request
from piecework.engine.resize import KVSize
from piecework.engine.streams import stream_deltas
from piecework.errors import ConfigError, EngineDeadError, QueueFullError, RequestError, WorkerLostError
from piecework.failsafe.audit import AuditReport
from piecework.failsafe.errors import ExhaustedError
from piecework.failsafe.events import Event
from piecework.models.config import ModelConfig
from piecework.profile import Profile
from piecework.runner.failover import Runners
from piecework.runner.load import Loaded
from piecework.runner.runner import Runner
from piecework.sampling import SamplingParams
from piecework.tokenizer.tokenizer import Tokenizer
from piecework.workers.serving.process import ProcessRunner
from piecework.workers.serving.runner import Context, StepRunner
from piecework.workers.serving.step_graph import StepGraph
from piecework.workers.tasks.limits import CapacityError

log = logging.getLogger("piecework.service")

T = TypeVar("T")

# A step may fail on its own; this many in a row mean that the next one will fail too.
_FAILURES_UNTIL_DEAD = 3
_LOSSES_SHOWN = 8
_CLOSE_SECONDS = 5.0
"""What the engine's thread gets to end by itself, before the workers are closed."""


class Service:
    """Loads a model and serves requests until `close`.

    Attributes: `config`, `model_config`, `tokenizer` (None where the model has none), `model_name`,
    `max_model_len`, `default_params` (from the model's generation_config), `profile`, `observers`, `runner`
    (its programs and counters may be read; it works on the engine's thread).
    """

    def __init__(
        self, config: EngineConfig, *, profile: Profile | None = None, worker: str | None = None
    ) -> None:
        """Load the model; `worker` is the name of its process, by default that of its device.

        Raises what `load` raises.

        Raises:
            ConfigError: the settings ask for several engines (see `make_service`), and this is one.
        """
        if (size := config.worker.data_parallel_size) > 1:
            raise ConfigError("data_parallel_size", size, "1 where one engine is looked at")
        self.config = config
        self.profile = profile or Profile(config.profile)
        depth = debug.level()
        self._lock = threading.Condition()
        self._processes: list[ProcessRunner] = []
        self._losses: deque[str] = deque(maxlen=_LOSSES_SHOWN)
        load = Loader(self._wake, self._processes.append, worker)
        self._runners = Runners(config, self.profile, load)
        with ExitStack() as failed:
            failed.callback(self._let_go)
            loaded = self._runners.loaded
            if depth and isinstance(loaded.runner, Runner):
                from piecework.explain.layers import show_layers

                show_layers(loaded.runner.programs, depth)
            self.model_config: ModelConfig = loaded.model_config
            self.tokenizer: Tokenizer | None = loaded.tokenizer
            self.model_name: str = config.load.served_model_name or config.load.model
            self.default_params: SamplingParams = loaded.default_params
            self.observers: list[Observer] = []
            self._use(loaded)
            self._audit = make_audit(config)
            self._graph = StepGraph.of(config, self.model_config, self.dtype)
            self._engine = Engine(self._audited(loaded), config, self._successor, self._graph)
            self._engine.on_finish = self._observe
            self._seeds = random.Random(config.load.seed)
            self._arrivals: list[Request] = []
            self._aborts: set[str] = set()  # of open requests only
            self._orders: list[Order] = []
            self._open: set[str] = set()
            self._closing = False
            self._draining = False
            self._dead: str | None = None
            self._stats = self._engine.stats()
            loaded.runner.device.release_threads()
            self._runners.settle()
            self._thread = threading.Thread(target=self._run, name="piecework-engine", daemon=True)
            self._thread.start()
            failed.pop_all()

    @property
    def device_name(self) -> str:
        """The device in use, as the settings call it."""
        return self._runners.active_device

    def _use(self, loaded: Loaded) -> None:
        """Show what the runner in use is like, and admit what it has room for."""
        runner: Any = loaded.runner  # a Runner, or a ProcessRunner in its place
        self.max_model_len: int = loaded.max_model_len
        self.weight_bytes: int = loaded.weight_bytes
        self.dtype: str = runner.dtype
        self.kv_dtype: str = str(runner.cache.dtype).removeprefix("torch.")
        self._admission = Admission(
            loaded.model_config,
            loaded.tokenizer,
            loaded.eos_ids,
            loaded.max_model_len,
            getattr(runner.cache, "capacities", None),
        )
        self.runner = runner
        self._remote: ProcessRunner | None = runner if isinstance(runner, ProcessRunner) else None
        if self._remote is not None:
            self._remote.take_loss()  # one that stood by may have died; nothing of a request was there

    def _audited(self, loaded: Loaded) -> StepRunner:
        """What the engine runs steps on: the runner, audited where that was asked for."""
        reference = self._runners.reference
        if self._audit is None or self._audit.ended is not None or reference in (None, loaded):
            return loaded.runner
        assert reference is not None
        self._audit.again()
        return AuditedRunner(loaded.runner, Reference(reference.runner, self.config), self._audit)

    def _wake(self) -> None:
        """A worker died, came back, or won't; called from a thread of its own."""
        with self._lock:
            self._lock.notify_all()

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        listener: Listener,
    ) -> str:
        """Queue a request and return its id; `listener` gets its deltas from the engine thread.

        Raises:
            RequestError: the request can't be served as it is; the message names the field.
            QueueFullError: too many requests wait.
            EngineDeadError: the engine has stopped, or is stopping.
        """
        request_id = request_id or uuid.uuid4().hex
        with self._lock:
            seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        requests = self._admission.requests(request_id, prompt_ids, params, seed, listener)
        with self._lock:
            self._refuse_if_stopping()
            if len(requests) > self._room():
                self._refuse_if_never(len(requests))
                raise QueueFullError(self.config.scheduler.max_queue)
            if request_id in self._open:
                raise RequestError(
                    f"request_id={request_id!r} is in use by a running request", param="request_id"
                )
            self._open.add(request_id)
            self._arrivals.extend(requests)
            self._lock.notify_all()
        return request_id

    def at_once(self) -> AbstractContextManager[object]:
        """What is submitted in a `with` of it arrives together: no step begins before the block ends."""
        return self._lock

    def wait_for_room(self, samples: int) -> None:
        """Return once the queue takes so many samples, or nothing any more; the next `submit` tells which."""
        with self._lock:
            self._lock.wait_for(lambda: self._room() >= samples or self._stopping())

    def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str | None = None
    ) -> AsyncIterator[Delta]:
        """Yield the deltas of a request; closing the iterator aborts what has not ended."""
        return stream_deltas(self, prompt_ids, params, request_id)

    def abort(self, request_id: str) -> None:
        """End a request as aborted and free its pages; an unknown or ended id is nothing to do."""
        with self._lock:
            if request_id in self._open:
                self._aborts.add(request_id)
                self._lock.notify_all()

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache."""
        nbytes: int = self.runner.cache.nbytes
        return nbytes

    def kv_size(self) -> KVSize:
        """Return how many pages the KV cache has and can have, between two steps.

        Raises EngineDeadError where the engine has stopped.
        """
        return self._order(lambda: self._engine.kv_size(self.max_model_len))

    def resize_kv(self, pages: int) -> KVSize:
        """Give the KV cache `pages` pages, the dummy among them, and return once it has them.

        Requests go on: where those that run hold more, the youngest wait again and are computed anew. The
        context stays what it is, and so one request of `max_model_len` tokens must fit.

        Raises:
            RequestError: `pages` can't be; the message says what can. Nothing has changed.
            EngineDeadError: the engine has stopped.
        """
        return self._order(lambda: self._engine.resize_kv(pages, self.max_model_len))

    def move_to(self, device: str) -> None:
        """Go on with another device of the list, also with one that failed before, and return once it runs.

        Running requests are computed again there and lose no token; nothing runs while it loads. From then on
        the devices behind it in the list take over from it. The device in use is nothing to do.

        Raises:
            RequestError: a device that is not in the list.
            EngineDeadError: the engine has stopped.
            PieceworkError: what loading raised; the device in use stays.
        """
        self._runners.check(device)
        self._order(lambda: self._move(device))

    def _order(self, what: Callable[[], T]) -> T:
        """Return what `what` does on the engine's thread, between two steps."""
        refuse_own_thread(self._thread)
        done: Future[T] = Future()
        with self._lock:
            if self._dead is not None or self._closing:
                raise EngineDeadError(self._dead or "it is shutting down")
            self._orders.append((what, done))
            self._lock.notify_all()
        return done.result()

    def audit(self) -> AuditReport | None:
        """Return what audits found; None where nothing is audited."""
        return self._audit.report() if self._audit is not None else None

    def stats(self) -> EngineStats:
        """Return gauges and counters as of the last step."""
        return self._stats

    def graph_counters(self) -> dict[str, dict[str, int]]:
        """Return what the programs `body` and `head` counted since the start (piecework.graph.counters)."""
        counters: dict[str, dict[str, int]] = self.runner.counters()
        return counters

    def workers(self) -> list[Context]:
        """Return what is known of the worker that runs steps."""
        remote, rings = self._remote, self._graph.rings()
        if remote is not None:
            stats = self._stats
            return [replace(remote.context(), running=stats.running, waiting=stats.waiting, rings=rings)]
        status = "closed" if self._closing else "ready"
        name = self.device_name
        return [Context(name, "inline", name, os.getpid(), 0, 0, status, rings=rings)]

    def failovers(self) -> tuple[Event, ...]:
        """Return the moves from one device to another since the start."""
        return self._runners.events

    def pauses(self) -> Pauses:
        """Return what these moves cost the requests that ran."""
        return self._engine.gaps.pauses

    def standby(self) -> dict[str, Any] | None:
        """Return device, status and memory of the standby, plain values; None where there is none."""
        return self._runners.standby

    def health(self) -> dict[str, Any]:
        """Return status, device, workers, and the events that led to it.

        `ok`; `restarting` where a worker died and its next process loads the model; `degraded` where a device
        or a piece of the model failed and another device does its work, or is about to; or `dead`.
        """
        remote = self._remote
        waits = remote is not None and not remote.ready
        return describe(
            self._runners,
            "dead" if self._dead is not None or self._closing else "restarting" if waits else "ok",
            moved_pieces=any(counters["moved_pieces"] for counters in self.graph_counters().values()),
            workers=self.workers(),
            losses=self._losses,
            carriages=self.pauses().carriages,
            audits=self._audit.notes if self._audit is not None else (),
            dead=self._dead,
        )

    def drain(self, timeout: float) -> bool:
        """Take no new requests and wait for the running ones; False where `timeout` s were not enough."""
        with self._lock:
            self._draining = True
            return self._lock.wait_for(lambda: not self._open or self._dead is not None, timeout)

    def close(self) -> None:
        """Stop the engine; requests that still run end as aborted. May be called twice."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        if threading.current_thread() is self._thread:
            return
        self._runners.stop()
        self._thread.join(_CLOSE_SECONDS)
        for process in self._processes:  # which ends a step that hangs there, and so the thread
            process.close()
        self._thread.join()
        self._let_go()

    def _let_go(self) -> None:
        self._runners.close()
        for process in self._processes:  # also one that was started meanwhile
            process.close()

    def _room(self) -> int:
        return self.config.scheduler.max_queue - len(self._arrivals) - self._stats.waiting

    def _refuse_if_never(self, samples: int) -> None:
        """An empty queue would not take them either: coming back later does not help."""
        limit = self.config.scheduler.max_queue
        if samples > limit:
            message = f"n={samples} is not allowed: at most {limit} samples may wait (max_queue)"
            raise RequestError(message, param="n", code="too_many_samples")

    def _stopping(self) -> bool:
        return self._dead is not None or self._closing or self._draining

    def _refuse_if_stopping(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        if self._closing or self._draining:
            raise EngineDeadError("it is shutting down")

    def _run(self) -> None:
        failures = 0
        while True:
            with self._lock:
                self._lock.wait_for(self._has_something_to_do, self._engine.gaps.seconds_left())
                if self._closing:
                    break
            try:
                self._take_commands()
                if (failure := self._failure()) is not None:
                    self._die(failure)
                    return
                self._engine.end_overdue()  # also while a worker is started again
                if self._worker_can():
                    self._engine.step()
                failures = 0
            except WorkerLostError as error:
                log.warning("a step was lost: %s", error)
            except CapacityError as error:
                log.warning("a step was refused: %s", error)
            except Exception as error:
                failures += 1
                if isinstance(error, ExhaustedError) and self._runners.gone:
                    self._die(str(error))
                    return
                log.exception("a step failed (%d of %d in a row)", failures, _FAILURES_UNTIL_DEAD)
                if failures == _FAILURES_UNTIL_DEAD:
                    self._die(f"{failures} steps failed in a row, the last with: {error}")
                    return
            self._publish_stats()
            self._settle()
        self._finish_all("abort", None)

    def _settle(self) -> None:
        try:
            self._runners.settle(waiting=bool(self._engine.gaps))
        except Exception:  # of a device that is let go: the one in use goes on
            log.exception("what a takeover left behind could not be put away")

    def _successor(self, error: Exception) -> tuple[StepRunner, Carried] | None:
        """Let the next device take over where it was the device that failed."""
        if isinstance(error, WorkerLostError) and not self._runners.can_move:
            return None  # its process is started again
        moves = self._runners.moves(error)  # the old cache is read before it is let go
        carried = self._engine.pack(self._runners.doubt(error)) if moves else Carried()

        def take_over() -> Loaded | None:
            found = self._runners.successor(error)
            if found is not None and threading.current_thread() is not self._thread:
                found.runner.device.release_threads()
            return found

        try:
            gaps = self._engine.gaps
            loaded = run_beside(take_over, gaps.seconds_left, self._engine.end_overdue)
        except ExhaustedError as exhausted:
            if self._runners.gone:
                with self._lock:
                    self._dead = str(exhausted)  # before a client hears of it and comes back
            raise
        if loaded is None:
            return None
        self._use(loaded)
        return self._audited(loaded), carried

    def _has_something_to_do(self) -> bool:
        if self._closing or self._arrivals or self._aborts or self._orders:
            return True
        remote = self._remote
        if remote is None:
            return self._engine.has_work
        able = remote.ready or self._runners.can_move
        return remote.lost or self._failure() is not None or (self._engine.has_work and able)

    def _failure(self) -> str | None:
        """Why no step will ever run again: its worker was given up, and no other device can go on."""
        return None if self._remote is None or self._runners.can_move else self._remote.failure()

    def _worker_can(self) -> bool:
        """Whether a step can be tried. What a dead worker held is given up, unless another device goes on."""
        remote = self._remote
        if remote is None:
            return True
        if (remote.lost or not remote.ready) and self._runners.can_move and self._engine.has_work:
            return True  # the step fails, and the next device goes on
        if (loss := remote.take_loss()) is not None:
            self._losses.append(loss)
            self._engine.lose_cache(loss)
        return remote.ready

    def _take_commands(self) -> None:
        with self._lock:
            arrivals, aborts, orders = list(self._arrivals), list(self._aborts), list(self._orders)
            self._arrivals.clear()
            self._aborts.clear()
            self._orders.clear()
            for request in arrivals:
                self._engine.add(request)
            self._stats = self._engine.stats()
        for request_id in aborts:
            self._engine.abort(request_id)
        carry_out(orders, self._dead or ("it is shutting down" if self._closing else None))

    def _move(self, device: str) -> None:
        carried = Carried() if self._runners.in_use(device) else self._engine.pack(self._runners.doubt())
        if (loaded := self._runners.move_to(device)) is not None:
            self._use(loaded)
            self._engine.take_over(self._audited(loaded), carried)

    def _die(self, cause: str) -> None:
        log.error("the engine stops: %s", cause)
        with self._lock:
            self._dead = cause
        self._finish_all("error", f"the engine is dead: {cause}")

    def _finish_all(self, reason: str, error: str | None) -> None:
        self._take_commands()
        self._engine.end_all(reason, error)
        self._publish_stats()

    def _publish_stats(self) -> None:
        with self._lock:
            self._stats = self._engine.stats()
            self._lock.notify_all()

    def _observe(self, request: Request, delta: Delta) -> None:
        with self._lock:
            self._stats = self._engine.stats()
            if not self._engine.is_open(request.request_id):
                self._open.discard(request.request_id)
                self._aborts.discard(request.request_id)  # or it would end the next one of that name
                self._lock.notify_all()
        for observer in self.observers:
            try:
                observer.finished(request.params, delta)
            except BaseException:  # not even SystemExit may end the engine's thread: clients would hang
                log.exception("an observer failed")
