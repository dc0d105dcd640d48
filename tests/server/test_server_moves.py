"""An operator moves a server with eight running streams to another device and back: no client notices."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from openai import OpenAI
from server_process import ServerProcess
from test_server_failover import FLAGS

KEY = "secret"
CLIENTS, TOKENS = 8, 32


@dataclass
class Streams:
    """Eight streams over HTTP, each in a thread of its own; their tokens are counted as they come."""

    client: OpenAI
    tokens: list[list[str]] = field(default_factory=lambda: [[] for _ in range(CLIENTS)])
    texts: list[str] = field(default_factory=lambda: [""] * CLIENTS)
    came: threading.Condition = field(default_factory=threading.Condition)

    def read(self, number: int) -> tuple[str | None, int]:
        """Read one stream to its end; how it ended, and the number of tokens by the server's count."""
        finish, used = None, 0
        answer = self.client.completions.create(
            model="smollm2-135m",
            prompt=f"Client {number} says:" + " and on" * number,
            max_tokens=TOKENS,
            temperature=0.0 if number % 2 else 0.8,
            seed=number,
            logprobs=0,
            stream=True,
            stream_options={"include_usage": True},
            # Of the whole vocabulary's tail, rounding would choose another token now and then.
            extra_body={"ignore_eos": True, "top_k": 20},
        )
        for chunk in answer:
            used = chunk.usage.completion_tokens if chunk.usage else used
            for choice in chunk.choices:
                finish = choice.finish_reason or finish
                with self.came:
                    self.texts[number] += choice.text
                    self.tokens[number] += choice.logprobs.tokens if choice.logprobs else []
                    self.came.notify_all()
        return finish, used

    def counts(self) -> list[int]:
        """How many tokens each client has."""
        with self.came:
            return [len(tokens) for tokens in self.tokens]

    def wait_for(self, tokens: int) -> None:
        """Return once every client has so many tokens."""
        with self.came:
            assert self.came.wait_for(lambda: min(map(len, self.tokens)) >= tokens, 120), self.counts()


def run(server: ServerProcess, moves: dict[int, str]) -> Streams:
    """Run all streams, and move to these devices once every client has so many tokens."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=120)
    streams = Streams(client)
    with ThreadPoolExecutor(CLIENTS) as pool:
        ends = [pool.submit(streams.read, number) for number in range(CLIENTS)]
        for tokens, device in moves.items():
            streams.wait_for(tokens)
            headers = {"Authorization": f"Bearer {KEY}"}
            answer = server.post("/admin/device", {"device": device}, headers=headers, timeout=120)
            assert (answer.status_code, answer.json().get("device")) == (200, device), answer.text
            assert max(streams.counts()) < TOKENS, "all streams go on after the move"
        assert {end.result() for end in ends} == {("length", TOKENS)}
    return streams


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("flags", [(), ("--isolate",)], ids=["inline", "isolate"])
def test_eight_streams_go_to_another_device_and_back(flags: tuple[str, ...], tmp_path: Path) -> None:
    shown = {"Authorization": f"Bearer {KEY}"}
    given = ("--api-key", KEY, "--device", "sim,cpu", *flags)
    with ServerProcess("smollm2-135m", *FLAGS, *given, log=tmp_path / "log") as server:
        clean = run(server, {})
        for away, back in ((4, 12), (1, 16)):
            moved = run(server, {away: "cpu", back: "sim"})
            assert moved.tokens == clean.tokens  # none is missing, none came twice
            assert moved.texts == clean.texts
        found = server.get("/admin/device", headers=shown).json()
        assert (found["device"], found["status"]) == ("sim", "ok")
        moves = [(event["from"], event["to"], event["stage"]) for event in found["events"]]
        assert moves == [("sim", "cpu", "asked"), ("cpu", "sim", "asked")] * 2
        assert "Traceback" not in server.log
