"""A small HTTP server that answers like some OpenAI-compatible server, or breaks in a chosen way.

The benchmark has to measure servers that are not ours; their answers, good and bad, are written out here.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Stub(ThreadingHTTPServer):
    """Answers streams of `tokens` words, `gap` seconds apart; `failure` names how it breaks.

    It answers once `together` requests have been there at once. Keeps the bodies and headers it got, and the
    most requests it had at once.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, tokens: int, gap: float, failure: str, usage: bool, together: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.tokens, self.gap, self.failure, self.usage = tokens, gap, failure, usage
        self.together = together
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.changed = threading.Condition()
        self.flying = self.peak = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def running(
    tokens: int = 4, gap: float = 0.0, failure: str = "", usage: bool = True, together: int = 1
) -> Iterator[Stub]:
    """Serve for as long as the block runs."""
    server = Stub(tokens, gap, failure, usage, together)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: Stub

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._json(200, {"object": "list", "data": [{"id": "stub-model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.changed:
            self.server.bodies.append(body)
            self.server.keys.append(self.headers.get("Authorization"))
            self.server.flying += 1
            self.server.peak = max(self.server.peak, self.server.flying)
            self.server.changed.notify_all()
            assert self.server.changed.wait_for(lambda: self.server.peak >= self.server.together, 60)
        if self.server.failure == "status":
            self._leave()
            self._json(422, {"error": {"message": "ignore_eos is not known", "type": "invalid"}})
        else:
            self._stream(body)

    def _leave(self) -> None:
        """Before the last bytes go: whoever has them may send the next request."""
        with self.server.changed:
            self.server.flying -= 1

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        chat = "messages" in body
        if chat:
            self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for number in range(self.server.tokens):
            time.sleep(self.server.gap)
            if self.server.failure == "breaks" and number == 2:
                self._leave()
                return
            if self.server.failure == "error" and number == 2:
                self._leave()
                self._event({"error": {"message": "out of memory", "code": 500}})
                return
            text = "" if self.server.failure == "silent" else f" w{number}"
            self._event({"choices": [{"delta": {"content": text}} if chat else {"text": text}]})
        if self.server.usage:
            counts = {"prompt_tokens": 7, "completion_tokens": self.server.tokens}
            self._event({"choices": [], "usage": counts})
        self._leave()
        self.wfile.write(b": a comment line\n\ndata: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def _json(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
