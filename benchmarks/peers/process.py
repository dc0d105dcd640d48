"""An engine in a process of its own, which stands still while it isn't asked anything."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
_ANSWER_SECONDS = 300.0


class EngineError(Exception):
    """An engine could not be loaded, or could not do what it was asked for."""


class EngineProcess:
    """A runner. Between `receive` and `send` it is stopped, so that its idle threads cannot spin.

    Raises EngineError from `receive` where the engine failed, ended or doesn't answer.
    """

    def __init__(self, python: str | Path, runner: str, log: Path) -> None:
        self._log = log
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [str(python), "-m", f"benchmarks.peers.runners.{runner}"],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
            )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def ask(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Send an operation and return the answer."""
        self.send(operation, **arguments)
        return self.receive()

    def send(self, operation: str, **arguments: Any) -> None:
        """Wake the engine and send an operation."""
        self._process.send_signal(signal.SIGCONT)
        line = json.dumps({"op": operation, **arguments}) + "\n"
        with contextlib.suppress(BrokenPipeError):  # `receive` tells why
            _pipe(self._process.stdin).write(line.encode())

    def receive(self) -> dict[str, Any]:
        """Wait for the answer, and stop the engine until it is asked again."""
        pipe = _pipe(self._process.stdout)
        line = b""
        while not line.endswith(b"\n"):
            if not select.select([pipe], [], [], _ANSWER_SECONDS)[0]:
                raise EngineError(f"no answer within {_ANSWER_SECONDS:.0f} s")
            part = pipe.read(1 << 20)
            if not part:
                raise EngineError(f"it ended: {self._last_words()}")
            line += part
        self._process.send_signal(signal.SIGSTOP)
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise EngineError(reply["error"])
        return reply

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            _pipe(pipe).close()

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.wait()}"


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
