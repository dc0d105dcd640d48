"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from piecework.engine.outputs import Delta
from piecework.sampling import TokenLogprob
from piecework.server.generation import Generation, Job
from piecework.server.params import scores_only
from piecework.server.prompts import Prompt
from piecework.server.protocol import CompletionRequest
from piecework.server.reading import read_request
from piecework.server.results import Envelope, Sample, UsageCount
from piecework.server.state import ServerState
from piecework.server.streaming import EventStream, encode_json, until_disconnect


def completion_router(state: ServerState) -> APIRouter:
    """The route, bound to one server's state."""
    router = APIRouter()

    async def completions(request: Request) -> Response:
        body = await read_request(request, CompletionRequest, state.config.max_body_bytes)
        state.check_model(body.model)
        prompts = await state.prompts.from_prompt(body.prompt, body.add_special_tokens)
        jobs = []
        for i, prompt in enumerate(prompts):
            state.prompts.check_length("prompt" if len(prompts) == 1 else f"prompt[{i}]", prompt.ids)
            jobs.append(Job(prompt.ids, state.params.completion(body, len(prompt.ids))))
        envelope = Envelope("cmpl", "text_completion", state.service.model_name)
        generation = state.start(envelope.id, jobs)
        answer = CompletionAnswer(state, envelope, body, prompts)
        if body.stream:
            events = answer.stream(generation)
            return EventStream(events, lambda: state.lifecycle.finished(generation))
        try:
            whole = await until_disconnect(request.receive, answer.whole(generation))
        finally:
            state.lifecycle.finished(generation)
        return Response(encode_json(whole), media_type="application/json")

    router.add_api_route("/v1/completions", completions, methods=["POST"], response_model=None)
    return router


class CompletionAnswer:
    """Writes the answer to one request. Choice number `prompt * n + sample` belongs to that prompt."""

    def __init__(
        self, state: ServerState, envelope: Envelope, body: CompletionRequest, prompts: list[Prompt]
    ) -> None:
        self._logprobs = state.logprobs
        self._tokenizer = state.service.tokenizer
        self._envelope = envelope
        self._body = body
        self._prompts = prompts
        self._n = body.n or state.service.default_params.n
        self._scores_only = scores_only(body)
        self._usage = UsageCount(len(prompt.ids) for prompt in prompts)

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """Wait for all samples and return the `text_completion` object."""
        samples = [[Sample() for _ in range(self._n)] for _ in self._prompts]
        async for i, delta in generation.deltas():
            samples[i][delta.index].add(delta)
            self._usage.add(i, delta.usage)
        choices = []
        for i, group in enumerate(samples):
            choices += [self._choice(i, index, sample) for index, sample in enumerate(group)]
        return self._envelope.wrap(choices, usage=self._usage_body())

    async def stream(self, generation: Generation) -> AsyncIterator[dict[str, Any]]:
        """Yield chunks, the prompt first where it is echoed."""
        more = {"usage": None} if self._body.include_usage else {}
        offsets: dict[tuple[int, int], int] = {}  # where the next token of a sample begins in its text
        async for i, delta in generation.deltas():
            self._usage.add(i, delta.usage)
            key = i, delta.index
            if self._body.echo and key not in offsets:
                text, logprobs = self._echo(i, delta.prompt_logprobs)
                offsets[key] = len(text)
                yield self._envelope.wrap([self._chunk(i, delta.index, text, logprobs)], **more)
            choice = self._delta_chunk(i, delta, offsets)
            if choice is not None:
                yield self._envelope.wrap([choice], **more)
        if self._body.include_usage:
            yield self._envelope.wrap([], usage=self._usage_body())

    def _choice(self, i: int, index: int, sample: Sample) -> dict[str, Any]:
        text, logprobs = self._echo(i, sample.prompt_logprobs) if self._body.echo else ("", None)
        if not self._scores_only:
            if self._body.logprobs is not None:
                own = self._logprobs.completion(sample.logprobs, sample.token_ids, len(text))
                logprobs = own if logprobs is None else {name: logprobs[name] + own[name] for name in own}
            text += "".join(sample.text)
        choice = self._chunk(i, index, text, logprobs) | self._end(sample.finish_reason, sample.stop_reason)
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._logprobs.prompt(sample.prompt_logprobs or ())
        return choice

    def _echo(
        self, i: int, scores: tuple[TokenLogprob | None, ...] | None
    ) -> tuple[str, dict[str, Any] | None]:
        wanted = self._body.logprobs is not None
        logprobs = self._logprobs.completion(scores or (), self._prompts[i].ids) if wanted else None
        return self._prompt_text(i), logprobs

    def _delta_chunk(
        self, i: int, delta: Delta, offsets: dict[tuple[int, int], int]
    ) -> dict[str, Any] | None:
        """A chunk for one delta; None where it holds nothing to send (half a character came)."""
        text = "" if self._scores_only else delta.text
        logprobs = None
        if delta.logprobs and self._body.logprobs is not None and not self._scores_only:
            offset = offsets.get((i, delta.index), 0)
            logprobs = self._logprobs.completion(delta.logprobs, delta.token_ids, offset)
            offsets[i, delta.index] = offset + sum(map(len, logprobs["tokens"]))
        if not (text or logprobs or delta.finish_reason):
            return None
        choice = self._chunk(i, delta.index, text, logprobs)
        if delta.finish_reason is not None:
            choice |= self._end(delta.finish_reason, delta.stop_reason)
        return choice

    def _chunk(self, i: int, index: int, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        number = i * self._n + index
        return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _prompt_text(self, i: int) -> str:
        prompt = self._prompts[i]
        if prompt.text is not None or self._tokenizer is None:
            return prompt.text or ""
        return self._tokenizer.decode(list(prompt.ids), skip_special_tokens=False)

    def _end(self, reason: str | None, stop_reason: str | int | None) -> dict[str, Any]:
        if self._scores_only:  # the one token that was made is not shown, so neither is how it ended
            return {"finish_reason": "length", "stop_reason": None}
        return {"finish_reason": reason, "stop_reason": stop_reason}

    def _usage_body(self) -> dict[str, Any]:
        return self._usage.body(generated=not self._scores_only)
