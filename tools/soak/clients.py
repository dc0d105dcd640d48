"""Clients that read streams, one after another, and note how each request ended."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections import Counter
from typing import Any

import httpx

from tools.soak.processes import LAST_PRIORITY

PATIENCE = 300.0
"""Seconds without an end after which a request counts as hung; a restart of all children takes part of it."""
_PAUSE = 0.2  # seconds before a client that was refused comes back
_TOKENS = 24


class Clients:
    """`count` clients in a thread. `address` is the server that they talk to, None while there is none.

    Attributes:
        ends: how many requests ended how: `result`, `error` with a message, `refused` with one (503 or
            429), `cut` where the server was killed.
        wrong: requests that ended otherwise, or not at all.
    """

    def __init__(self, count: int, address: str) -> None:
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.address: str | None = address
        self._killed: set[str] = set()
        self._stop = False
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run(count)), name="soak-clients", daemon=True
        )
        self._thread.start()

    def server_killed(self, address: str) -> None:
        """Say, before it happens, that connections of this server will break."""
        self._killed.add(address)
        self.address = None

    def stop(self) -> bool:
        """Let requests end and start none; False where some don't end."""
        self._stop = True
        self._thread.join(2 * PATIENCE)
        return not self._thread.is_alive()

    async def _run(self, count: int) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LAST_PRIORITY)
        async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=count)) as client:
            await asyncio.gather(*(self._one(client, number) for number in range(count)))

    async def _one(self, client: httpx.AsyncClient, number: int) -> None:
        asked = 0
        while not self._stop:
            address = self.address
            if address is None:
                await asyncio.sleep(_PAUSE)
                continue
            asked += 1
            length = 1 + (number + asked) % 40
            prompt = [3 + (number * 31 + asked * 7 + place) % 200 for place in range(length)]
            try:
                end = await asyncio.wait_for(self._ask(client, address, prompt), PATIENCE)
            except TimeoutError:
                self.wrong.append(f"a request of client {number} hung for {PATIENCE:.0f} s")
                continue
            except httpx.TransportError as error:
                end = "cut"
                if address not in self._killed:
                    self.wrong.append(f"the connection broke: {type(error).__name__}: {error}")
            self.ends[end] += 1
            if end != "result":
                await asyncio.sleep(_PAUSE)

    async def _ask(self, client: httpx.AsyncClient, address: str, prompt: list[int]) -> str:
        body: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": _TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        tokens, reason = 0, None
        async with client.stream("POST", address + "/v1/completions", json=body) as response:
            if response.status_code != 200:
                return self._refused(response.status_code, await response.aread())
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if not data or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    return self._said("error", event)
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                for choice in event["choices"]:
                    reason = choice["finish_reason"] or reason
        if (tokens, reason) != (_TOKENS, "length"):
            self.wrong.append(f"a stream ended with {tokens} tokens and finish_reason {reason}")
        return "result"

    def _refused(self, status: int, text: bytes) -> str:
        if status not in (429, 500, 503):
            self.wrong.append(f"HTTP {status}: {text.decode(errors='replace')}")
            return "refused"
        return self._said("refused" if status != 500 else "error", json.loads(text))

    def _said(self, kind: str, body: dict[str, Any]) -> str:
        error = body["error"]
        if not error.get("message") or error.get("code") == "internal_error":
            self.wrong.append(f"an error that says nothing: {error}")
        return kind
