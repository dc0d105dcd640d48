"""A server of our own in another process, for as long as a benchmark needs one."""

from __future__ import annotations

import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from piecework.errors import ModelError

READY = re.compile(r"Serving .* at (http\S+)")
_START_SECONDS = 600.0
_STOP_SECONDS = 40.0


@contextmanager
def own_server(settings: Mapping[str, Any], api_key: str | None) -> Iterator[str]:
    """Run `piecework serve` on a free port of this machine and yield its address.

    `settings` are leaves of the configuration. Raises ModelError with the server's last words where it
    ends before it listens. The server is stopped with SIGTERM when the block ends.
    """
    with tempfile.TemporaryDirectory(prefix="piecework-bench-") as folder:
        config = Path(folder) / "settings.yaml"  # JSON is YAML
        config.write_text(json.dumps(dict(settings)), encoding="utf-8")
        log = Path(folder) / "log"
        with log.open("wb") as errors:
            command = [sys.executable, "-m", "piecework", "serve", "--config", str(config), "--port", "0"]
            environment = {**os.environ, **({"PIECEWORK_API_KEY": api_key} if api_key else {})}
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment)
        try:
            yield _address(process, log)
        finally:
            _stop(process)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait for the line that tells the address; what the server prints later is read and dropped."""
    found: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(process.stdout, found), daemon=True).start()
    try:
        address = found.get(timeout=_START_SECONDS)
    except queue.Empty:
        raise ModelError(f"the server did not listen within {_START_SECONDS:.0f} s") from None
    if address is None:
        code = process.wait()
        words = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
        raise ModelError(f"the server ended with exit code {code} before it listened: {' / '.join(words)}")
    return address


def _read(stdout: IO[bytes] | None, found: queue.SimpleQueue[str | None]) -> None:
    for line in stdout or ():
        text = line.decode(errors="replace")
        if match := READY.search(text):
            found.put(match[1])
    found.put(None)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
