"""The server that is killed, or parts of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from tools.soak.processes import LAST_PRIORITY, descendants, open_files, started_at, wait_until

START_SECONDS = 400.0
_ORPHAN_SECONDS = 60.0
ASKING = 0.1
"""Seconds between two questions for the workers' health."""
_READY = re.compile(r"Serving .* at (http\S+)")


class Server:
    """`piecework serve` with `children` workers of a model with random weights, ready when it is made."""

    def __init__(self, model: str, children: int, log: Path) -> None:
        flags = {
            "--model": model,
            "--load-format": "dummy",
            "--dtype": "float32",
            "--threads": "1",
            "--num-pages": "200",
            "--port": "0",
            "--workers": "process",
            "--data-parallel-size": str(children),
            "--served-model-name": "soak",
        }
        words = [word for pair in flags.items() for word in pair]
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "piecework", "serve", *words],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self._http = httpx.Client(timeout=30)
        self.address = self._wait_for_address()
        if not wait_until(lambda: len(self.ready()) == children, START_SECONDS, ASKING):
            raise AssertionError(f"not all of the {children} children came up")
        self.files = open_files(self._process.pid)

    def ready(self) -> list[dict[str, Any]]:
        """Return the workers that can run steps, as /health shows them."""
        try:
            body = self._http.get(self.address + "/health").json()
        except httpx.HTTPError:
            return []
        found = [worker for worker in body["workers"] if worker["status"] == "ready"]
        for worker in found:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, worker["pid"], LAST_PRIORITY)
        return found

    def leaked(self) -> list[str]:
        """Return what is open beyond what was at the start, once that is settled."""
        wait_until(lambda: len(open_files(self._process.pid)) <= len(self.files), START_SECONDS)
        now = open_files(self._process.pid)
        return now if len(now) > len(self.files) else []

    def kill(self) -> tuple[float, set[int]]:
        """Kill it, and return the seconds that its descendants outlived it, and those that still do."""
        family = self._family()
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        return self._left(family)

    def stop(self) -> tuple[int, set[int]]:
        """End it as a user does; return its exit code and the descendants that it left."""
        family = self._family()
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return code, self._left(family)[1]

    def _family(self) -> dict[int, str | None]:
        return {pid: started_at(pid) for pid in descendants(self._process.pid)}

    def _left(self, family: dict[int, str | None]) -> tuple[float, set[int]]:
        def left() -> set[int]:
            return {pid for pid, start in family.items() if start is not None and started_at(pid) == start}

        began = time.monotonic()
        wait_until(lambda: not left(), _ORPHAN_SECONDS)
        seconds = time.monotonic() - began
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._http.close()
        return seconds, left()

    def _wait_for_address(self) -> str:
        timer = threading.Timer(START_SECONDS, self._process.kill)
        timer.start()
        try:
            for line in self._process.stdout or ():
                if found := _READY.search(line):
                    return found[1]
        finally:
            timer.cancel()
        raise AssertionError(f"the server ended with exit code {self._process.wait()} before it listened")
