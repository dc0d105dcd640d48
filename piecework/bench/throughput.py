"""`bench throughput`: how many tokens a second come out when many prompts are there at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from piecework.bench.cost import model_cost
from piecework.bench.datasets import DEFAULT_OUTPUT_LEN, random_lengths, sharegpt_requests
from piecework.bench.floor import ReadFloor
from piecework.bench.offline import Job, check_fits, compare, random_job, run_alone, run_together, what_ran
from piecework.bench.options import ThroughputOptions
from piecework.engine.service import Service
from piecework.errors import ModelError
from piecework.profile import now


def run_throughput(
    service: Service, options: ThroughputOptions, seed: int, on_done: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Run all prompts together and return the figures; `on_done` is called for each prompt that ends.

    Before it, `options.verify` of the prompts run alone; their tokens are compared with those of the run.
    """
    jobs = make_jobs(service, options, seed)
    for job in jobs:
        check_fits(service, len(job.prompt_ids), job.output_len)
    alone = run_alone(service, jobs[: options.verify])
    cost = model_cost(service.model_config, service.weight_bytes)
    floor = ReadFloor(cost.step_bytes(len(jobs)))
    service.profile.reset()
    steps = service.stats().steps_total
    before = floor.read()
    start = now()
    results = run_together(service, jobs, on_done)
    elapsed = now() - start
    after = floor.read()
    steps = service.stats().steps_total - steps
    check = compare([r.token_ids for r in alone], [r.token_ids for r in results[: len(alone)]])
    prompt_tokens = sum(len(job.prompt_ids) for job in jobs)
    output_tokens = sum(len(result.token_ids) for result in results)
    flops = (prompt_tokens + output_tokens) * cost.token_flops(head=False) + 2.0 * cost.head * output_tokens
    report = {
        **what_ran(service),
        "check": str(check),
        "outputs_equal": check.equal,
        "outputs_compared": check.compared,
        "num_requests": len(jobs),
        "elapsed_time": elapsed,
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "total_num_tokens": prompt_tokens + output_tokens,
        "requests_per_second": len(jobs) / elapsed,
        "output_tokens_per_second": output_tokens / elapsed,
        "tokens_per_second": (prompt_tokens + output_tokens) / elapsed,
        "steps": steps,
        "weight_gb_s": floor.nbytes * steps / elapsed / 1e9,
        "floor_gb_s": floor.nbytes / ((before + after) / 2) / 1e9,
        "gflop_s": flops / elapsed / 1e9,
        "preemptions": service.stats().preemptions_total,
    }
    if service.profile.enabled:
        report["profile"] = service.profile.snapshot()
    return report


def make_jobs(service: Service, options: ThroughputOptions, seed: int) -> list[Job]:
    """Return the prompts as token ids, from the data set that `options` name."""
    if options.dataset == "random" or options.dataset_path is None:
        rng = random.Random(seed)
        count, ratio = options.num_prompts, options.range_ratio
        inputs = random_lengths(count, options.input_len, ratio, rng)
        outputs = random_lengths(count, options.output_len or DEFAULT_OUTPUT_LEN, ratio, rng)
        vocabulary = service.model_config.vocab_size
        return [random_job(i, o, vocabulary, rng) for i, o in zip(inputs, outputs, strict=True)]
    tokenizer = service.tokenizer
    if tokenizer is None:
        raise ModelError("this model has no tokenizer, which --dataset sharegpt needs; use --dataset random")
    requests = sharegpt_requests(
        options.dataset_path,
        options.num_prompts,
        options.output_len,
        seed,
        lambda text: len(tokenizer.encode(text)),
    )
    return [Job(tokenizer.encode(request.prompt), request.output_len) for request in requests]
