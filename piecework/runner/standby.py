"""The next device's model, made in the background while another device serves, so that it can take over."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from piecework.profile import now
from piecework.runner.forecast import Forecast
from piecework.runner.load import Loaded

log = logging.getLogger("piecework.failsafe")


class Standby:
    """Makes the model on one device after another until one can, in a thread of its own; see `take`.

    A device that can't isn't lost: it is tried again when it is its turn to serve.
    """

    def __init__(self, load: Callable[[str], Loaded], foretell: Callable[[str], Forecast | None]) -> None:
        """Make nothing yet.

        Args:
            load: loads the model on a device.
            foretell: says what that will take; raises ConfigError where it doesn't fit.
        """
        self._load = load
        self._foretell = foretell
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._made: Loaded | None = None
        self._device = ""
        self._status = ""
        self._names: tuple[str, ...] = ()
        self._forecast: Forecast | None = None
        self._closed = threading.Event()
        self._events: tuple[dict[str, Any], ...] = ()

    @property
    def events(self) -> tuple[dict[str, Any], ...]:
        """What became of each device, in order; plain values."""
        return self._events

    def is_warm(self, name: str) -> bool:
        """Whether `take` gives the model on this device at once."""
        return self._device == name and self._state() == "warm"

    def start(self, names: Sequence[str]) -> None:
        """Begin with the first of `names`, the devices that are next now.

        Does nothing where it is begun already; one that is no longer the next is let go.
        """
        with self._lock:
            if self._closed.is_set():
                return
            if self._status == "building":
                self._names = self._names if names else ()
                return
            is_next = tuple(names) == self._names or self._device in names[:1]
            if names and is_next and self._state() == "warm":
                return
            made, self._made, self._status = self._made, None, ""
            self._names = tuple(names)
            if names:
                self._device, self._status, self._forecast = names[0], "building", None
                self._thread = threading.Thread(
                    target=self._build, args=(self._names,), name="piecework-standby", daemon=True
                )
                self._thread.start()
        if made is not None:
            made.runner.close()

    def take(self, name: str) -> Loaded | None:
        """Return the model on this device, once it is made; None where there is none, or it died."""
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            if self._device != name or self._made is None:
                return None
            warm = self._state() == "warm"
            made, self._made, self._status = self._made, None, ""
        if warm:
            return made
        made.runner.close()
        return None

    def stop(self) -> None:
        """Make nothing more; a build that runs goes on, but nobody hears of its end."""
        with self._lock:
            self._closed.set()

    def close(self) -> None:
        """Wait for a build to end, and let go what it made."""
        self.stop()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            made, self._made, self._status = self._made, None, ""
        if made is not None:
            made.runner.close()

    def as_dict(self) -> dict[str, Any] | None:
        """Device, status (`building`, `warm` or `failed`) and memory, in bytes; None where there is none."""
        with self._lock:
            if not self._status:
                return None
            sizes = self._forecast.as_dict() if self._forecast else {}
            return {**sizes, "device": self._device, "status": self._state()}

    def _state(self) -> str:
        """The status; one whose process died has failed, until that is back."""
        runner: Any = self._made.runner if self._made is not None else None
        return self._status if getattr(runner, "ready", True) else "failed"

    def _build(self, names: Sequence[str]) -> None:
        for name in names:
            if self._closed.is_set():
                return
            self._device, began = name, now()
            self._tell(name, "building", f"{name} is made ready")
            try:
                self._forecast = self._foretell(name)
                if self._forecast is not None:
                    log.info("%s", self._forecast)
                made = self._load(name)
            except Exception as error:
                if self._closed.is_set():
                    return
                reason = " ".join(str(error).split())
                log.warning("the standby %s can't be made now, so it is made when needed: %s", name, reason)
                self._tell(name, "failed", reason)
                continue
            made.runner.device.release_threads()
            seconds = now() - began
            with self._lock:
                if wanted := bool(self._names):  # told first: who sees that it is warm finds the event
                    self._tell(name, "warm", f"ready to take over after {seconds:.2f} s")
                self._made, self._status = (made, "warm") if wanted else (None, "")
            if wanted:
                log.info("the standby %s is warm after %.2f s", name, seconds)
            else:
                made.runner.close()
            return
        with self._lock:
            self._status = "failed"

    def _tell(self, name: str, status: str, reason: str) -> None:
        event = {
            "at": round(time.time(), 3),
            "device": name,
            "stage": "standby",
            "status": status,
            "reason": reason,
        }
        self._events = (*self._events, event)
