"""One streamed request to an OpenAI-compatible server, with the times at which its tokens came."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from piecework.bench.datasets import BenchRequest
from piecework.profile import now

if TYPE_CHECKING:
    import httpx

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True)
class Target:
    """Which API of which model is called, and the settings that every request shares."""

    model: str
    endpoint: str = "completions"
    ignore_eos: bool = True


@dataclass
class Outcome:
    """What became of one request. Times in seconds; `error` is set where it failed.

    `itl` are the times between arrivals of text; a server that sends several tokens at once has fewer
    of them than tokens.
    """

    text: str = ""
    error: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft: float = 0.0
    e2e: float = 0.0
    itl: list[float] = field(default_factory=list)

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None for a single token."""
        return (self.e2e - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


class StreamError(Exception):
    """The server answered with something that is not a complete stream."""


async def send(client: httpx.AsyncClient, target: Target, request: BenchRequest) -> Outcome:
    """Send one greedy request and read its stream to the end; a failure is told in the outcome."""
    import httpx

    outcome = Outcome()
    start = now()
    try:
        await _stream(client, target, request, outcome, start)
    except StreamError as error:
        outcome.error = str(error)
    except (httpx.HTTPError, ValueError, KeyError, TypeError, IndexError) as error:
        outcome.error = f"{type(error).__name__}: {error}".strip(": ")
    outcome.e2e = now() - start
    return outcome


def body(target: Target, request: BenchRequest) -> dict[str, Any]:
    """Return the JSON that is sent."""
    sent: dict[str, Any] = {
        "model": target.model,
        "max_tokens": request.output_len,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.ignore_eos:
        sent["ignore_eos"] = True
    if target.endpoint == "chat":
        sent["messages"] = [{"role": "user", "content": request.prompt}]
    else:
        sent["prompt"] = request.prompt
    return sent


async def _stream(
    client: httpx.AsyncClient, target: Target, request: BenchRequest, outcome: Outcome, start: float
) -> None:
    last = start
    chunks = 0
    ended = False
    async with client.stream("POST", PATHS[target.endpoint], json=body(target, request)) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            raise StreamError(f"HTTP {response.status_code}: {_message(text)}")
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                ended = True
                break
            event = json.loads(data)
            if "error" in event:
                raise StreamError(_message(data))
            text = _text(event, target.endpoint)
            if text:
                arrived = now()
                if chunks == 0:
                    outcome.ttft = arrived - start
                else:
                    outcome.itl.append(arrived - last)
                last = arrived
                chunks += 1
                outcome.text += text
            usage = event.get("usage")
            if usage:
                outcome.prompt_tokens = usage["prompt_tokens"]
                outcome.output_tokens = usage["completion_tokens"]
    if not ended:
        raise StreamError("the stream broke off before [DONE]")
    if chunks == 0:
        raise StreamError("the stream held no text")
    # A server without stream_options: one chunk is taken for one token.
    outcome.output_tokens = outcome.output_tokens or chunks


def _text(event: dict[str, Any], endpoint: str) -> str:
    choices = event.get("choices") or [{}]
    if endpoint == "chat":
        delta = choices[0].get("delta") or {}
        return str(delta.get("content") or delta.get("reasoning_content") or "")
    return str(choices[0].get("text") or "")


def _message(text: str) -> str:
    """The message of an OpenAI error body, or the body's beginning."""
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return text[:200]
