"""POST /tokenize and /detokenize, in vLLM's form."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from piecework.errors import RequestError
from piecework.server.protocol import DetokenizeRequest, TokenizeRequest
from piecework.server.reading import read_request
from piecework.server.state import ServerState


def token_router(state: ServerState) -> APIRouter:
    """The routes, bound to one server's state."""
    router = APIRouter()

    async def tokenize(request: Request) -> dict[str, Any]:
        body = await read_request(request, TokenizeRequest, state.config.max_body_bytes)
        state.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("send either prompt or messages", param="prompt", code="missing_parameter")
        if body.prompt is not None:
            ids = (await state.prompts.from_text(body.prompt, body.add_special_tokens)).ids
        else:
            ids = await state.prompts.from_messages(body)
        answer = {"count": len(ids), "max_model_len": state.service.max_model_len, "tokens": list(ids)}
        if body.return_token_strs:
            answer["token_strs"] = [state.logprobs.text(token) for token in ids]
        return answer

    async def detokenize(request: Request) -> dict[str, Any]:
        body = await read_request(request, DetokenizeRequest, state.config.max_body_bytes)
        state.check_model(body.model)
        ids = state.prompts.check_ids("tokens", body.tokens)
        tokenizer = state.service.tokenizer
        if tokenizer is None:
            message = "tokens cannot become text: this model has no tokenizer"
            raise RequestError(message, param="tokens", code="no_tokenizer")
        text = await asyncio.to_thread(tokenizer.decode, ids, skip_special_tokens=body.skip_special_tokens)
        return {"prompt": text}

    router.add_api_route("/tokenize", tokenize, methods=["POST"], response_model=None)
    router.add_api_route("/detokenize", detokenize, methods=["POST"], response_model=None)
    return router
