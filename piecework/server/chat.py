"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from piecework.engine.outputs import Delta
from piecework.sampling import SamplingParams
from piecework.server.generation import Generation, Job
from piecework.server.protocol import ChatRequest
from piecework.server.reading import read_request
from piecework.server.results import Envelope, Sample, UsageCount
from piecework.server.state import ServerState
from piecework.server.streaming import EventStream, encode_json, until_disconnect


def chat_router(state: ServerState) -> APIRouter:
    """The route, bound to one server's state."""
    router = APIRouter()

    async def chat_completions(request: Request) -> Response:
        body = await read_request(request, ChatRequest, state.config.max_body_bytes)
        state.check_model(body.model)
        prompt_ids = await state.prompts.from_messages(body)
        state.prompts.check_length("messages", prompt_ids)
        params = state.params.chat(body, len(prompt_ids))
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        envelope = Envelope("chatcmpl", kind, state.service.model_name)
        generation = state.start(envelope.id, [Job(prompt_ids, params)])
        answer = ChatAnswer(state, envelope, params, len(prompt_ids))
        if body.stream:
            events = answer.stream(generation, body.include_usage)
            return EventStream(events, lambda: state.lifecycle.finished(generation))
        try:
            whole = await until_disconnect(request.receive, answer.whole(generation))
        finally:
            state.lifecycle.finished(generation)
        return Response(encode_json(whole), media_type="application/json")

    router.add_api_route("/v1/chat/completions", chat_completions, methods=["POST"], response_model=None)
    return router


class ChatAnswer:
    """Writes the answer to one chat request, at once or in chunks."""

    def __init__(
        self, state: ServerState, envelope: Envelope, params: SamplingParams, prompt_tokens: int
    ) -> None:
        self._logprobs = state.logprobs
        self._envelope = envelope
        self._params = params
        self._usage = UsageCount([prompt_tokens])

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """Wait for all samples and return the `chat.completion` object."""
        samples = [Sample() for _ in range(self._params.n)]
        async for _, delta in generation.deltas():
            samples[delta.index].add(delta)
            self._usage.add(0, delta.usage)
        more: dict[str, Any] = {}
        scores = next((s.prompt_logprobs for s in samples if s.prompt_logprobs), None)
        if self._params.prompt_logprobs is not None and scores is not None:
            more["prompt_logprobs"] = self._logprobs.prompt(scores)
        choices = [self._choice(index, sample) for index, sample in enumerate(samples)]
        return self._envelope.wrap(choices, usage=self._usage.body(), **more)

    async def stream(self, generation: Generation, include_usage: bool) -> AsyncIterator[dict[str, Any]]:
        """Yield `chat.completion.chunk` objects: per sample its role, its text, its finish_reason."""
        more = {"usage": None} if include_usage else {}
        seen: set[int] = set()
        async for _, delta in generation.deltas():
            self._usage.add(0, delta.usage)
            for choice in self._chunks(delta, delta.index not in seen):
                yield self._envelope.wrap([choice], **more)
            seen.add(delta.index)
        if include_usage:
            yield self._envelope.wrap([], usage=self._usage.body())

    def _choice(self, index: int, sample: Sample) -> dict[str, Any]:
        text = "".join(sample.text)
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs.chat(sample.logprobs) if self._wants_logprobs else None,
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }

    def _chunks(self, delta: Delta, first: bool) -> list[dict[str, Any]]:
        chunks = []
        if first:
            chunks.append(_chunk(delta.index, {"role": "assistant", "content": ""}))
        logprobs = self._logprobs.chat(delta.logprobs) if self._wants_logprobs and delta.logprobs else None
        if delta.text or logprobs:
            chunks.append(_chunk(delta.index, {"content": delta.text}, logprobs))
        if delta.finish_reason is not None:
            end = _chunk(delta.index, {})
            chunks.append({**end, "finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason})
        return chunks

    @property
    def _wants_logprobs(self) -> bool:
        return self._params.logprobs is not None


def _chunk(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
