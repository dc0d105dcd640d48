"""Piecework, in the environment that runs the benchmark."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.protocol import Times, Tokens, serve
from piecework.bench.cost import model_cost
from piecework.bench.floor import ReadFloor
from piecework.config import EngineConfig
from piecework.engine.offline import run_requests
from piecework.engine.service import Service
from piecework.profile import now
from piecework.sampling import SamplingParams
from piecework.version import __version__


class Piecework:
    """The engine, and the read floor of its weights. `settings` are leaves of its configuration."""

    def __init__(self, model: str, threads: int, **settings: Any) -> None:
        own = {"model": model, "threads": threads, "prefix_caching": False}  # a round may be repeated
        config = EngineConfig.from_flat({**own, **settings})
        self._service = Service(config)
        step_bytes = model_cost(self._service.model_config, self._service.weight_bytes).step_bytes(1)
        self._floor = ReadFloor(step_bytes)
        self.facts = {
            "version": __version__,
            "weight_bytes": step_bytes,
            "dtype": self._service.dtype,
            "vocab_size": self._service.model_config.vocab_size,
        }

    def generate(self, prompts: Tokens, output_len: int) -> tuple[Tokens, Times]:
        """See `Engine`. A token's time is that at which this thread has it."""
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        tokens: Tokens = [[] for _ in prompts]
        times: Times = [[] for _ in prompts]
        start = now()
        for number, delta in run_requests(self._service, prompts, params):
            tokens[number] += delta.token_ids
            times[number] += [now() - start] * len(delta.token_ids)
            if delta.error is not None:
                raise RuntimeError(delta.error)
        return tokens, times

    def floor(self) -> dict[str, float]:
        """Read as many bytes as the weights of a step with all threads, and return bytes and seconds."""
        return {"bytes": self._floor.nbytes, "seconds": self._floor.read()}


if __name__ == "__main__":
    serve(Piecework)
