"""Asks the questions of GSM8K, in this process or on a server, and counts what is right."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from piecework.engine.offline import run_requests
from piecework.engine.result import Result
from piecework.engine.service import Service
from piecework.errors import RequestError
from piecework.eval.gsm8k import STOP, Question, answer_value
from piecework.eval.options import Gsm8kOptions
from piecework.profile import now
from piecework.sampling import SamplingParams

Done = Callable[[], None]


@dataclass(frozen=True)
class Answer:
    """What came back for one question; `error` says why nothing did."""

    text: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None


def ask_service(
    service: Service, questions: Sequence[Question], options: Gsm8kOptions, on_done: Done = lambda: None
) -> dict[str, Any]:
    """Ask a model in this process, greedily, and return the report.

    Raises RequestError where it has no tokenizer or a prompt with its answer is longer than the context.
    """
    tokenizer = service.tokenizer
    if tokenizer is None:
        raise RequestError("this model has no tokenizer, and the questions are texts", param="prompt")
    prompts = [tokenizer.encode(question.prompt) for question in questions]
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, stop=STOP)
    results = [Result() for _ in prompts]
    start = now()
    with closing(run_requests(service, prompts, params, options.parallel)) as deltas:
        for number, delta in deltas:
            results[number].add(delta)
            if delta.finish_reason is not None:
                on_done()
    seconds = now() - start
    answers = [
        Answer(r.text, r.usage.prompt_tokens, r.usage.completion_tokens, r.finish_reason, r.error)
        for r in results
    ]
    setting = {"model_id": service.model_name, "device": service.device_name, "dtype": service.dtype}
    return {**setting, **score(questions, answers, seconds, options)}


def ask_server(
    model: str | None, questions: Sequence[Question], options: Gsm8kOptions, on_done: Done = lambda: None
) -> dict[str, Any]:
    """Ask the server at `options.base_url`; without `model` the first one that it lists.

    Requests that fail count as invalid and are listed under `errors`. Raises ConfigError where there is no
    such server.
    """
    from piecework.bench.serving import first_model, make_client

    base_url = options.base_url or ""
    limit = asyncio.Semaphore(options.parallel)

    async def all_answers() -> tuple[str, list[Answer], float]:
        async with make_client(base_url, options.api_key, options.request_timeout) as client:
            name = model or await first_model(client)

            async def one(question: Question) -> Answer:
                async with limit:
                    answer = await _post(client, name, question.prompt, options.max_tokens)
                on_done()
                return answer

            start = now()
            answers = await asyncio.gather(*map(one, questions))
            return name, list(answers), now() - start

    name, answers, seconds = asyncio.run(all_answers())
    return {"model_id": name, "base_url": base_url, **score(questions, answers, seconds, options)}


async def _post(client: Any, model: str, prompt: str, max_tokens: int) -> Answer:
    import httpx

    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "stop": list(STOP),
    }
    try:
        response = await client.post("/v1/completions", json=body)
        if response.status_code != 200:
            return Answer(error=f"HTTP {response.status_code}: {response.text[:200]}")
        found = response.json()
        choice, usage = found["choices"][0], found.get("usage") or {}
        return Answer(
            str(choice["text"]),
            int(usage.get("prompt_tokens", 0)),
            int(usage.get("completion_tokens", 0)),
            choice.get("finish_reason"),
        )
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        return Answer(error=f"{type(error).__name__}: {error}".strip(": "))


def score(
    questions: Sequence[Question], answers: Sequence[Answer], seconds: float, options: Gsm8kOptions
) -> dict[str, Any]:
    """Return the report: shares of right and of invalid answers, times, and every answer."""
    values = [None if answer.error else answer_value(answer.text) for answer in answers]
    right = [value == question.answer for question, value in zip(questions, values, strict=True)]
    outputs = sum(answer.output_tokens for answer in answers)
    errors = Counter(answer.error for answer in answers if answer.error is not None)
    return {
        "num_questions": len(questions),
        "num_shots": options.num_shots,
        "parallel": options.parallel,
        "accuracy": sum(right) / len(right),
        "invalid": values.count(None) / len(values),
        "cut": sum(answer.finish_reason == "length" for answer in answers) / len(answers),
        "failed": sum(errors.values()),
        "errors": dict(errors.most_common()),
        "latency": seconds,
        "total_input_tokens": sum(answer.prompt_tokens for answer in answers),
        "total_output_tokens": outputs,
        "output_throughput": outputs / seconds,
        "answers": [
            {
                "text": answer.text,
                "value": None if value is None else str(value),
                "expected": str(question.answer),
                "right": good,
            }
            for question, answer, value, good in zip(questions, answers, values, right, strict=True)
        ],
    }
