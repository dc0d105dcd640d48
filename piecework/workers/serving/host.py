"""The child's side: loads the model, keeps weights and KV cache, runs the steps that it is sent."""

from __future__ import annotations

import dataclasses
from typing import Any

from piecework.collector import imports_stay
from piecework.workers.process.host import Context
from piecework.workers.process.messages import decode, encode


class ServingHost:
    """Made from the engine's settings. `programs` are the runner's."""

    def __init__(self, context: Context) -> None:
        with imports_stay():
            from piecework.config import EngineConfig
            from piecework.profile import Profile
            from piecework.runner.load import load
            from piecework.workers.serving.steps import Step, StepReader
            from piecework.workers.serving.worker import Shape, counters_of

        settings: dict[str, Any] = decode(dict, context.options)
        config = EngineConfig.from_flat(settings)
        self._profile = Profile(config.profile)
        loaded = load(config, self._profile, with_tokenizer=False)
        self.programs = loaded.runner.programs
        self._runner = loaded.runner
        self._reader = StepReader()
        self._step = Step
        shape = dataclasses.asdict(Shape.of(loaded))
        self._counters_of = counters_of
        self.info = encode({"shape": shape, "times": self._times(), "counters": counters_of(self.programs)})

    def handle(self, method: str, body: bytes, fds: tuple[int, ...]) -> bytes:
        """Answer `step` or `counters`."""
        if method == "step":
            return self._run(body)
        if method == "counters":
            return encode(self._counters_of(self.programs))
        raise ValueError(f"a worker that serves has no method {method}")

    def close(self) -> None:
        """Give graphs back to the device."""
        self._runner.graphs.release()

    def _run(self, body: bytes) -> bytes:
        step = decode(self._step, body)
        self._profile.enabled = step.profiled
        results = self._runner.execute(self._reader.read(step))
        return encode((results, self._times() if step.profiled else {}))

    def _times(self) -> dict[str, float]:
        """Seconds by stage since the last time."""
        timers = self._profile.snapshot()["timers"]
        self._profile.reset()
        return {name: timer["total_ms"] / 1e3 for name, timer in timers.items()}
