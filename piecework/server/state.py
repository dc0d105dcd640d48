"""What the routes of one app share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from piecework.config import ServerConfig
from piecework.errors import RequestError
from piecework.server.errors import ApiError
from piecework.server.generation import Generation, Job
from piecework.server.lifecycle import Lifecycle
from piecework.server.logprobs import LogprobWriter
from piecework.server.metrics import ServerMetrics
from piecework.server.params import ParamsReader
from piecework.server.prompts import PromptReader
from piecework.server.reading import shorten

if TYPE_CHECKING:
    from piecework.engine.service import Service


class ServerState:
    """The service, its readers and writers, and the lifecycle; made once for each app."""

    def __init__(self, service: Service, config: ServerConfig) -> None:
        self.service = service
        self.config = config
        self.lifecycle = Lifecycle()
        self.metrics = ServerMetrics(service)
        self.prompts = PromptReader(service)
        self.params = ParamsReader(
            service.default_params, service.model_config.vocab_size, service.max_model_len
        )
        self.logprobs = LogprobWriter(service.tokenizer)

    def check_model(self, name: str | None) -> None:
        """Refuse another model's name with 404; no name at all means the one that is served."""
        served = self.service.model_name
        if name is not None and name != served:
            message = f"model={shorten(name)} is not served here; the model is {served!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _check_count(self, jobs: list[Job]) -> None:
        """Refuse what could never be queued at once: coming back later would not help."""
        count = sum(job.params.n for job in jobs)
        limit = self.service.config.scheduler.max_queue
        if count > limit:
            param = "n" if len(jobs) == 1 else "prompt"
            message = f"{param} asks for {count} samples at once; at most {limit} may wait (max_queue)"
            raise RequestError(message, param=param, code="too_many_samples")

    def start(self, request_id: str, jobs: list[Job]) -> Generation:
        """Submit jobs to the engine; the caller ends them with `lifecycle.finished`."""
        self._check_count(jobs)
        generation = Generation(self.service, request_id, jobs)
        generation.submit()
        self.lifecycle.started(generation)
        return generation
