"""The engine behind a thread-safe door: one thread runs it, any thread or event loop may submit."""

from __future__ import annotations

import logging
import random
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

from piecework import debug
from piecework.config import EngineConfig
from piecework.engine.admission import Admission
from piecework.engine.engine import Engine
from piecework.engine.gaps import Pauses
from piecework.engine.health import describe
from piecework.engine.intake import Intake
from piecework.engine.loader import Loader
from piecework.engine.observer import Observer
from piecework.engine.orders import carry_out, refuse_own_thread
from piecework.engine.outputs import Delta, EngineStats
from piecework.engine.request import Listener, Request
from piecework.engine.resize import KVSize
from piecework.engine.step_worker import StepWorker
from piecework.engine.streams import stream_deltas
from piecework.engine.takeover import Takeover
from piecework.errors import ConfigError, WorkerLostError
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
from piecework.workers.serving.runner import Context
from piecework.workers.serving.step_graph import StepGraph
from piecework.workers.tasks.limits import CapacityError

log = logging.getLogger("piecework.service")

T = TypeVar("T")

# A step may fail on its own; this many in a row mean that the next one will fail too.
_FAILURES_UNTIL_DEAD = 3
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
        self._intake = Intake(config.scheduler.max_queue)
        processes: list[ProcessRunner] = []
        self._runners = Runners(config, self.profile, Loader(self._intake.wake, processes.append, worker))
        self._worker = StepWorker(self._runners, processes)
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
            self._takeover = Takeover(config, self._runners, self._use, self._intake.die)
            self._graph = StepGraph.of(config, self.model_config, self.dtype)
            self._engine = Engine(
                self._takeover.runner(loaded),
                config,
                lambda error: self._takeover.after(error, self._engine),
                self._graph,
            )
            failed.callback(self._engine.close)
            self._engine.on_finish = self._observe
            self._seeds, self._seeds_lock = random.Random(config.load.seed), threading.Lock()
            self._intake.publish(self._engine.stats())
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
        self.quantized: str = loaded.quantized
        self.repacked: bool = loaded.repacked
        self.kv_dtype: str = str(runner.cache.dtype).removeprefix("torch.")
        self._admission = Admission(
            loaded.model_config,
            loaded.tokenizer,
            loaded.eos_ids,
            loaded.max_model_len,
            getattr(runner.cache, "capacities", None),
        )
        self.runner = runner
        self._worker.use(runner)

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
        with self._seeds_lock:
            seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        requests = self._admission.requests(request_id, prompt_ids, params, seed, listener)
        self._intake.put(request_id, requests)
        return request_id

    def at_once(self) -> AbstractContextManager[object]:
        """What is submitted in a `with` of it arrives together: no step begins before the block ends."""
        return self._intake.at_once()

    def wait_for_room(self, samples: int) -> None:
        """Return once the queue takes so many samples, or nothing any more; the next `submit` tells which."""
        self._intake.wait_for_room(samples)

    def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str | None = None
    ) -> AsyncIterator[Delta]:
        """Yield the deltas of a request; closing the iterator aborts what has not ended."""
        return stream_deltas(self, prompt_ids, params, request_id)

    def abort(self, request_id: str) -> None:
        """End a request as aborted and free its pages; an unknown or ended id is nothing to do."""
        self._intake.abort(request_id)

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
        self._order(lambda: self._takeover.by_hand(device, self._engine))

    def _order(self, what: Callable[[], T]) -> T:
        """Return what `what` does on the engine's thread, between two steps."""
        refuse_own_thread(self._thread)
        return self._intake.order(what)

    def audit(self) -> AuditReport | None:
        """Return what audits found; None where nothing is audited."""
        audit = self._takeover.audit
        return audit.report() if audit is not None else None

    def stats(self) -> EngineStats:
        """Return gauges and counters as of the last step."""
        return self._intake.stats

    def graph_counters(self) -> dict[str, dict[str, int]]:
        """Return what the programs `body` and `head` counted since the start (piecework.graph.counters)."""
        counters: dict[str, dict[str, int]] = self.runner.counters()
        return counters

    def workers(self) -> list[Context]:
        """Return what is known of the worker that runs steps."""
        intake = self._intake
        return [self._worker.context(intake.stats, self._graph.rings(), intake.closing)]

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
        dead, audit = self._intake.dead, self._takeover.audit
        gone = dead is not None or self._intake.closing
        return describe(
            self._runners,
            "dead" if gone else "restarting" if self._worker.restarting else "ok",
            moved_pieces=any(counters["moved_pieces"] for counters in self.graph_counters().values()),
            workers=self.workers(),
            losses=self._worker.losses,
            carriages=self.pauses().carriages,
            audits=audit.notes if audit is not None else (),
            dead=dead,
        )

    def drain(self, timeout: float) -> bool:
        """Take no new requests and wait for the running ones; False where `timeout` s were not enough."""
        return self._intake.drain(timeout)

    def close(self) -> None:
        """Stop the engine; requests that still run end as aborted. May be called twice."""
        self._intake.close()
        if threading.current_thread() is self._thread:
            return
        self._runners.stop()
        self._thread.join(_CLOSE_SECONDS)
        self._worker.close()  # which ends a step that hangs there, and so the thread
        self._thread.join()
        self._let_go()

    def _let_go(self) -> None:
        self._runners.close()
        self._worker.close()  # also a process that was started meanwhile

    def _run(self) -> None:
        failures = 0
        while True:
            self._intake.wait(self._has_work, self._engine.gaps.seconds_left())
            if self._intake.closing:
                break
            try:
                self._take_commands()
                if (failure := self._worker.failure()) is not None:
                    self._die(failure)
                    return
                self._engine.end_overdue()  # also while a worker is started again
                able = self._worker.can_step(self._engine.has_work, self._engine.lose_cache)
                if able and self._engine.step():
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
            self._intake.publish(self._engine.stats())
            self._settle()
        self._finish_all("abort", None)

    def _settle(self) -> None:
        try:
            self._runners.settle(waiting=bool(self._engine.gaps))
        except Exception:  # of a device that is let go: the one in use goes on
            log.exception("what a takeover left behind could not be put away")

    def _has_work(self) -> bool:
        return self._worker.needs_the_engine(self._engine.has_work)

    def _take_commands(self) -> None:
        engine, intake = self._engine, self._intake
        aborts, orders = intake.take(engine.add, engine.stats)
        for request_id in aborts:
            engine.abort(request_id)
        carry_out(orders, intake.dead or ("it is shutting down" if intake.closing else None))

    def _die(self, cause: str) -> None:
        log.error("the engine stops: %s", cause)
        self._intake.die(cause)
        self._finish_all("error", f"the engine is dead: {cause}")

    def _finish_all(self, reason: str, error: str | None) -> None:
        self._take_commands()
        self._engine.end_all(reason, error)
        self._engine.close()
        self._intake.publish(self._engine.stats())

    def _observe(self, request: Request, delta: Delta) -> None:
        engine, request_id = self._engine, request.request_id
        self._intake.ended(request_id, engine.stats(), still_open=engine.is_open(request_id))
        for observer in self.observers:
            try:
                observer.finished(request.params, delta)
            except BaseException:  # not even SystemExit may end the engine's thread: clients would hang
                log.exception("an observer failed")
