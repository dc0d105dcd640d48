"""Several engines with the same model, each in a worker process of its own, behind the door of one."""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import fields, replace
from typing import Any

from piecework.config import EngineConfig
from piecework.devices.registry import numbered_device
from piecework.engine.gaps import Pauses
from piecework.engine.observer import Observer
from piecework.engine.outputs import Delta, EngineStats
from piecework.engine.request import Listener
from piecework.engine.resize import KVSize
from piecework.engine.routing import Router
from piecework.engine.service import Service
from piecework.engine.streams import stream_deltas
from piecework.engine.threads import default_threads
from piecework.errors import ConfigError, EngineDeadError, QueueFullError
from piecework.failsafe.audit import AuditReport
from piecework.failsafe.events import Event
from piecework.profile import Profile, now
from piecework.sampling import SamplingParams
from piecework.workers.serving.runner import Context


def make_service(config: EngineConfig) -> Service:
    """Load the model once, or into as many children as `data_parallel_size` says."""
    if config.worker.data_parallel_size == 1:
        return Service(config)
    return DataParallel(config)  # type: ignore[return-value]  # it has what is asked of a Service


def child_config(config: EngineConfig, rank: int) -> EngineConfig:
    """Return what child `rank` is loaded with: its own device, or its share of the host's threads.

    Raises:
        ConfigError: there are several devices, or one to audit with; a child that dies is started again on
            its own.
    """
    size = config.worker.data_parallel_size
    if config.audit.audit_device is not None:
        raise ConfigError("audit_device", config.audit.audit_device, f"none where data_parallel_size={size}")
    if config.device.several:
        raise ConfigError("device", config.device.device, f"one device where data_parallel_size={size}")
    threads = config.device.threads
    if threads is None:  # each would take all
        threads = max(1, default_threads() // size)
    device = numbered_device(config.device.first, rank)
    return replace(
        config,
        device=replace(config.device, device=device, threads=threads),
        worker=replace(config.worker, workers="process", data_parallel_size=1),
    )


class DataParallel:
    """A `Service` of several children: each has the whole model, a scheduler and a KV cache of its own.

    A request, with all its samples, goes to the child that has the fewest tokens to compute. A child's
    death ends the requests that it ran; it is loaded again while the others go on. Attributes are those
    of `Service`, of which all children have the same; `runner` is the first one's.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Load all children at once; raises what the first one that fails raises, and closes the others."""
        self.config = config
        self.profile = Profile(config.profile)
        self.observers: list[Observer] = []
        size = config.worker.data_parallel_size
        configs = [child_config(config, rank) for rank in range(size)]
        self._services = self._load(configs)
        first = self._services[0]
        self.model_config, self.tokenizer = first.model_config, first.tokenizer
        self.model_name, self.default_params = first.model_name, first.default_params
        for service in self._services:
            service.observers = self.observers
        self._router = Router(self._services)
        self._lock = threading.Lock()
        self._seeds = random.Random(config.load.seed)
        self._stopping = False

    def _load(self, configs: Sequence[EngineConfig]) -> list[Service]:
        with ThreadPoolExecutor(len(configs), "piecework-load") as pool:
            starts = [
                pool.submit(Service, config, profile=self.profile, worker=f"dp{rank}")
                for rank, config in enumerate(configs)
            ]
        failed = [start.exception() for start in starts if start.exception() is not None]
        if failed:
            self._close_all([start.result() for start in starts if start.exception() is None])
            raise failed[0]  # type: ignore[misc]
        return [start.result() for start in starts]

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        listener: Listener,
    ) -> str:
        """Queue a request at a child, see `Service.submit`; refused where all of them refuse it."""
        request_id = request_id or uuid.uuid4().hex
        if params.seed is None:  # which child takes it changes no token
            with self._lock:
                params = replace(params, seed=self._seeds.getrandbits(63))
        refused: dict[Service, Exception] = {}
        while len(refused) < len(self._services):
            if self._stopping:
                raise EngineDeadError("it is shutting down")
            service, counted = self._router.place(request_id, len(prompt_ids), params, refused, listener)
            try:
                return service.submit(prompt_ids, params, request_id=request_id, listener=counted)
            except (QueueFullError, EngineDeadError) as error:
                self._router.withdraw(request_id)
                refused[service] = error
            except BaseException:
                self._router.withdraw(request_id)
                raise
        errors = list(refused.values())
        raise next((error for error in errors if isinstance(error, QueueFullError)), errors[0])

    def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str | None = None
    ) -> AsyncIterator[Delta]:
        """Yield the deltas of a request; closing the iterator aborts what has not ended."""
        return stream_deltas(self, prompt_ids, params, request_id)

    def abort(self, request_id: str) -> None:
        """End a request as aborted, whichever child has it; an unknown or ended id is nothing to do."""
        service = self._router.holder(request_id)
        if service is not None:
            service.abort(request_id)

    def at_once(self) -> AbstractContextManager[object]:
        """What is submitted in a `with` of it arrives together, at whichever child; see `Service.at_once`."""
        with ExitStack() as held:
            for service in self._services:
                held.enter_context(service.at_once())
            return held.pop_all()

    def wait_for_room(self, samples: int) -> None:
        """Return once the child that would be asked first takes so many samples, or nothing any more."""
        self._router.next().wait_for_room(samples)

    @property
    def device_name(self) -> str:
        """The devices in use, as the settings call them, each once."""
        return ",".join(dict.fromkeys(service.device_name for service in self._services))

    @property
    def runner(self) -> Any:
        """That of the first child; the others' have the same shape."""
        return self._services[0].runner

    @property
    def max_model_len(self) -> int:
        """What every child has room for."""
        return min(service.max_model_len for service in self._services)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a token reads: those of one child."""
        return self._services[0].weight_bytes

    @property
    def dtype(self) -> str:
        """The precision that the model runs in."""
        return self._services[0].dtype

    @property
    def quantized(self) -> str:
        """The quantisation of the weights."""
        return self._services[0].quantized

    @property
    def repacked(self) -> bool:
        """Whether weights are laid out for the kernels."""
        return self._services[0].repacked

    @property
    def kv_dtype(self) -> str:
        """What the KV caches hold."""
        return self._services[0].kv_dtype

    @property
    def kv_bytes(self) -> int:
        """Bytes of all KV caches."""
        return sum(service.kv_bytes for service in self._services)

    def kv_size(self) -> KVSize:
        """Return how many pages each KV cache has and can have; raises EngineDeadError where all are dead."""
        for service in self._services[:-1]:
            with suppress(EngineDeadError):
                return service.kv_size()
        return self._services[-1].kv_size()

    def resize_kv(self, pages: int) -> KVSize:
        """Refused, as for each cache that is in a process of its own."""
        return self._services[0].resize_kv(pages)

    def stats(self) -> EngineStats:
        """Return the sums over all children, as of their last steps."""
        return _sum([service.stats() for service in self._services])

    def graph_counters(self) -> dict[str, dict[str, int]]:
        """Return what the programs of all children counted together."""
        total: dict[str, dict[str, int]] = {}
        for service in self._services:
            for program, counts in service.graph_counters().items():
                into = total.setdefault(program, {})
                for name, count in counts.items():
                    into[name] = into.get(name, 0) + count
        return total

    def workers(self) -> list[Context]:
        """Return what is known of the children, by rank."""
        contexts = [context for service in self._services for context in service.workers()]
        pending = zip(contexts, self.pending_tokens(), strict=True)
        return [replace(context, pending_tokens=tokens) for context, tokens in pending]

    def pending_tokens(self) -> list[int]:
        """Return the tokens, of prompts and answers, that each child has yet to compute, at most."""
        return self._router.pending_tokens()

    def failovers(self) -> tuple[Event, ...]:
        """Return nothing: a child that dies is started again where it was."""
        return ()

    def pauses(self) -> Pauses:
        """Return nothing, as there are no moves."""
        return Pauses()

    def standby(self) -> dict[str, Any] | None:
        """Return None: there is no next device."""
        return None

    def audit(self) -> AuditReport | None:
        """Return None: nothing is audited."""
        return None

    def move_to(self, device: str) -> None:
        """Refused, as for a list of one device: the one in use is nothing to do, any other a RequestError."""
        self._services[0].move_to(device)

    def health(self) -> dict[str, Any]:
        """Return status, devices, workers and events as `Service.health` does; `worker` names whose it is.

        `degraded` where one child is not `ok` and another can still answer.
        """
        found = [service.health() for service in self._services]
        states = {one["status"] for one in found}
        usable = "degraded" if states & {"ok", "degraded"} else "restarting"
        return {
            "status": states.pop() if len(states) == 1 else usable,
            "device": self.device_name,
            "workers": [context.as_dict() for context in self.workers()],
            "events": [
                {"worker": context.name, **event}
                for one, context in zip(found, self.workers(), strict=True)
                for event in one["events"]
            ],
        }

    def drain(self, timeout: float) -> bool:
        """Take no new requests and wait for the running ones; False where `timeout` s were not enough."""
        end = now() + timeout
        self._stopping = True
        drained = [service.drain(max(0.0, end - now())) for service in self._services]
        return all(drained)

    def close(self) -> None:
        """Stop all children at once; requests that still run end as aborted. May be called twice."""
        self._stopping = True
        self._close_all(self._services)

    @staticmethod
    def _close_all(services: Sequence[Service]) -> None:
        if services:
            with ThreadPoolExecutor(len(services), "piecework-close") as pool:
                list(pool.map(Service.close, services))


def _sum(stats: Sequence[EngineStats]) -> EngineStats:
    total: dict[str, Any] = {one.name: getattr(stats[0], one.name) for one in fields(EngineStats)}
    for child in stats[1:]:
        for name, so_far in total.items():
            more = getattr(child, name)
            if isinstance(so_far, dict):
                total[name] = {key: so_far.get(key, 0) + more.get(key, 0) for key in {**so_far, **more}}
            else:
                total[name] = so_far + more
    return EngineStats(**total)
