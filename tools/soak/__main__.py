"""`python -m tools.soak`: random kills of a server's processes under load; nothing may hang, leak or stay.

Each kill is a SIGKILL, of a child or of the server itself. The exit code is 1 where something was wrong, or
where time was over before the last kill.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tools.gpu_check.shapes import write_shape
from tools.soak.clients import Clients
from tools.soak.processes import shared_memory, wait_until
from tools.soak.schedule import Kill, make_schedule
from tools.soak.server import ASKING, START_SECONDS, Server


def main(arguments: list[str] | None = None) -> int:
    """Run, print a report in JSON, and return the exit code."""
    parser = argparse.ArgumentParser(prog="tools.soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--streams", type=int, default=16, help="clients that read a stream at any time")
    parser.add_argument("--children", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=10.0, help="the kills end after so long")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="piecework-soak-") as folder:
        soak = Soak(Path(folder), options.children, options.streams)
        schedule = make_schedule(options.kills, options.seed)
        report = soak.run(schedule, options.minutes * 60)
        print(json.dumps({"seed": options.seed, "asked": options.kills, **report}, indent=2))
        if report["wrong"]:
            print(soak.last_words())
    return int(bool(report["wrong"]) or report["kills"] < options.kills)


class Soak:
    """One run. What is wrong is gathered, not raised: later kills may show more."""

    def __init__(self, folder: Path, children: int, streams: int) -> None:
        self._model = write_shape(folder, "tiny-qwen3")
        self._log = folder / "log"
        self._children = children
        self._streams = streams
        self._wrong: list[str] = []
        self._outlived = 0.0

    def run(self, schedule: list[Kill], seconds: float) -> dict[str, Any]:
        """Kill by the schedule; return counts, and what was wrong."""
        segments, began = shared_memory(), time.monotonic()
        killed = {"child": 0, "server": 0}
        server = self._start()
        clients = Clients(self._streams, server.address)
        try:
            for kill in schedule:
                if time.monotonic() - began > seconds:
                    break
                before = clients.ends["result"]  # it works again before the next one
                self._check(
                    wait_until(lambda before=before: clients.ends["result"] > before, START_SECONDS),
                    f"no request was answered in {START_SECONDS:.0f} s",
                )
                time.sleep(kill.delay)
                if kill.server:
                    self._kill_server(server, clients)
                    server = self._start()
                    clients.address = server.address
                else:
                    self._kill_child(server, kill.number)
                killed["server" if kill.server else "child"] += 1
            spent = time.monotonic() - began
            self._settle(server)
            if not clients.stop():
                self._wrong.append("clients still wait for an end")
        finally:
            clients.stop()
            code, left = server.stop()
        self._check(code == 0, f"the server ended with exit code {code}")
        self._check(not left, f"processes outlived the server: {left}")
        more = shared_memory() - segments
        self._check(not more, f"left in /dev/shm: {sorted(more)}")
        return {
            "kills": sum(killed.values()),
            "killed": killed,
            "seconds": round(spent, 1),
            "requests": dict(clients.ends),
            "orphans_outlived_ms": round(self._outlived * 1e3),
            "wrong": [*self._wrong, *clients.wrong],
        }

    def last_words(self, lines: int = 30) -> str:
        """Return the end of the servers' log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    def _start(self) -> Server:
        return Server(self._model, self._children, self._log)

    def _kill_child(self, server: Server, number: int) -> None:
        ready: list[dict[str, Any]] = []

        def look() -> bool:
            ready[:] = server.ready()
            return bool(ready)

        if not wait_until(look, START_SECONDS, ASKING):
            self._wrong.append("no child came back")
            return
        with suppress(ProcessLookupError):  # it may have gone by itself, and that would show in its requests
            os.kill(ready[number % len(ready)]["pid"], signal.SIGKILL)

    def _kill_server(self, server: Server, clients: Clients) -> None:
        clients.server_killed(server.address)
        seconds, left = server.kill()
        self._outlived = max(self._outlived, seconds)
        self._check(not left, f"processes outlived the server that was killed: {left}")

    def _settle(self, server: Server) -> None:
        """All children come back, and the server has no more open than in the beginning."""
        back = wait_until(lambda: len(server.ready()) == self._children, START_SECONDS, ASKING)
        self._check(back, "not all children came back")
        leaked = server.leaked()
        self._check(not leaked, f"open files of the server, at first {server.files}, in the end {leaked}")

    def _check(self, good: bool, complaint: str) -> None:
        if not good:
            self._wrong.append(complaint)


if __name__ == "__main__":
    raise SystemExit(main())
