"""What the benchmarks without a server share: prompts of token ids, runs, and the check of their tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from piecework.engine.offline import in_order, run_requests
from piecework.engine.result import Result
from piecework.engine.service import Service
from piecework.errors import EngineDeadError, RequestError
from piecework.sampling import SamplingParams


@dataclass(frozen=True)
class Job:
    """A prompt and the tokens to generate, past the end token."""

    prompt_ids: Sequence[int]
    output_len: int


def random_job(input_len: int, output_len: int, vocab_size: int, rng: random.Random) -> Job:
    """Return a job whose prompt is random token ids."""
    return Job([rng.randrange(vocab_size) for _ in range(input_len)], output_len)


def what_ran(service: Service) -> dict[str, Any]:
    """Return what a report says of the engine that was measured."""
    return {
        "model_id": service.model_name,
        "device": service.device_name,
        "dtype": service.dtype,
        "quantized": service.quantized,
        "repacked": service.repacked,
    }


def check_fits(service: Service, input_len: int, output_len: int) -> None:
    """Raise RequestError where a job of these lengths is longer than the context."""
    if input_len + output_len > service.max_model_len:
        raise RequestError(
            f"input_len={input_len} and output_len={output_len} do not fit: together at most "
            f"{service.max_model_len} (max_model_len)",
            param="output_len",
        )


def run_together(
    service: Service, jobs: Sequence[Job], on_done: Callable[[], None] = lambda: None
) -> list[Result]:
    """Submit all jobs at once, greedy, and return their results in order; a failed one raises."""
    params = [SamplingParams(temperature=0.0, max_tokens=job.output_len, ignore_eos=True) for job in jobs]
    results = []
    with closing(run_requests(service, [job.prompt_ids for job in jobs], params)) as deltas:
        for _, result in in_order(deltas, [1] * len(jobs)):
            if result.finish_reason != "length":
                raise EngineDeadError(result.error or f"a request ended by {result.finish_reason}")
            results.append(result)
            on_done()
    return results


def run_alone(service: Service, jobs: Sequence[Job]) -> list[Result]:
    """Run the jobs one after the other: the reference of `run_together`."""
    return [run_together(service, [job])[0] for job in jobs]


@dataclass(frozen=True)
class Check:
    """How many of `compared` outputs had the tokens of the reference, and where others left it first."""

    compared: int
    equal: int
    first_difference: int | None = None

    def __str__(self) -> str:
        if self.equal == self.compared:
            return f"{self.equal} of {self.compared} equal to the output alone"
        return (
            f"{self.equal} of {self.compared} equal to the output alone; "
            f"the earliest difference is at token {self.first_difference}"
        )


def compare(reference: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> Check:
    """Compare token ids, output by output.

    Sums of another order may choose the other one of two tokens that are nearly equally likely, in
    bfloat16 more often than in float32; so a difference is told, and judged by whoever reads it.
    """
    differences = []
    for wanted, got in zip(reference, found, strict=True):
        if list(wanted) != list(got):
            pairs = zip(wanted, got, strict=False)
            shorter = min(len(wanted), len(got))
            differences.append(next((i for i, (a, b) in enumerate(pairs) if a != b), shorter))
    first = min(differences) if differences else None
    return Check(len(reference), len(reference) - len(differences), first)
