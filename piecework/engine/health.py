"""How a service is, for `/health`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from piecework.engine.carry import Carriage
from piecework.runner.failover import Runners
from piecework.workers.serving.runner import Context


def describe(
    runners: Runners,
    status: str,
    *,
    moved_pieces: bool,
    workers: Sequence[Context],
    losses: Iterable[str],
    carriages: Iterable[Carriage],
    audits: Iterable[str],
    dead: str | None,
) -> dict[str, Any]:
    """Return status, device, workers, and the events that led to it; see `Service.health`.

    Args:
        status: `ok`, `restarting` where a worker is started again, or `dead`, with the reason in `dead`.
        moved_pieces: whether pieces run on another device than theirs.
        losses: why workers died. carriages: how requests moved. audits: what audits noted.
    """
    events: list[dict[str, Any]] = [event.as_dict() for event in runners.events]
    events += runners.standby_events
    events += [{"stage": "worker", "reason": reason} for reason in losses]
    events += [{"stage": "audit", "reason": note} for note in audits]
    events += [] if dead is None else [{"stage": "run", "reason": dead}]
    if status == "restarting" and runners.can_move:
        status = "degraded"
    if status == "ok" and (runners.degraded or moved_pieces):
        status = "degraded"
    standby, moved = runners.standby, [carriage.as_dict() for carriage in carriages]
    return {
        "status": status,
        "device": runners.active_device,
        **({} if standby is None else {"standby": standby}),
        **({"takeovers": moved} if moved else {}),
        "workers": [context.as_dict() for context in workers],
        "events": events,
    }
