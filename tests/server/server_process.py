"""A server in a process of its own, started through the command line as a user starts it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI


class ServerProcess:
    """`piecework serve` on a free port; `stop` (or the end of a `with`) ends it."""

    def __init__(self, model: str, *flags: str, log: Path, env: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "piecework", "serve", "--model", model, "--port", "0", *flags]
        self._log = log
        self._errors = log.open("w")
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=variables
        )
        # One client for all: each one that is made reads the certificates anew, which takes a while.
        self.http = httpx.Client(timeout=60)
        self.url = self._ready_url()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def log(self) -> str:
        return self._log.read_text()

    @cached_property
    def openai(self) -> OpenAI:
        return OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60, http_client=self.http
        )

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        if body is not None:
            options["json"] = body
        return self.http.post(self.url + path, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(self.url + path, **options)

    def metric(self, name: str) -> float:
        """The value of one series, written as in /metrics, labels and all."""
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(name + " "):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"/metrics has no series {name}")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = 240) -> int:
        return self.process.wait(seconds)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.http.close()
        self._errors.close()

    def _ready_url(self) -> str:
        """Read the announced URL; a server that ends or hangs instead fails with its log."""
        assert self.process.stdout is not None
        timer = threading.Timer(300, self.process.kill)
        timer.start()
        try:
            for line in self.process.stdout:
                found = re.search(r"http://\S+", line)
                if found:
                    return found.group()
        finally:
            timer.cancel()
        self.stop()
        raise AssertionError(f"the server did not start:\n{self.log}")
