"""How much an orchestration may hold at once, and the error where it wants more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from piecework.errors import ConfigError, PieceworkError
from piecework.units import parse_size

RINGS = 4
"""Limits are kept for this many depths of scopes; deeper ones share the last."""
KNOBS = {"heap": "--ring-heap", "task-window": "--ring-task-window", "dep-pool": "--ring-dep-pool"}
"""The resources (bytes of outputs, tasks, edges) and the settings that limit them."""


class CapacityError(PieceworkError):
    """An orchestration needs more than a limit allows, and what it waited for did not become free.

    `resource` is a key of KNOBS, `ring` the scope depth, `used` and `limit` are bytes, tasks or edges.
    """

    def __init__(self, resource: str, ring: int, used: int, wanted: int, limit: int) -> None:
        self.resource, self.ring = resource, ring
        self.used, self.wanted, self.limit = used, wanted, limit
        self.knob = KNOBS[resource]
        super().__init__(
            f"{resource} of ring {ring}: {used} used and {wanted} more wanted, the limit is {limit}; "
            f"raise {self.knob} or end scopes earlier"
        )


@dataclass(frozen=True)
class Limits:
    """What may be held in each of the RINGS scope depths.

    Attributes:
        heap: bytes of OUTPUT tensors that their scope still holds.
        task_window: tasks that their scope still holds.
        dep_pool: edges that lead to those tasks.
        timeout: seconds to wait for room.
    """

    heap: tuple[int, ...] = (4 * 2**30,) * RINGS
    task_window: tuple[int, ...] = (2**20,) * RINGS
    dep_pool: tuple[int, ...] = (2**20,) * RINGS
    timeout: float = 10.0

    @classmethod
    def parse(
        cls, heap: str | int, task_window: str | int, dep_pool: str | int, timeout: float = 10.0
    ) -> Limits:
        """Read limits as settings give them: one value, or four with commas (`1GiB,64M,8M,1M`)."""
        return cls(
            _four("ring_heap", heap),
            _four("ring_task_window", task_window),
            _four("ring_dep_pool", dep_pool),
            timeout,
        )

    def of(self, resource: str) -> tuple[int, ...]:
        """Return a resource's limits by ring."""
        return {"heap": self.heap, "task-window": self.task_window, "dep-pool": self.dep_pool}[resource]


class Rings:
    """What is held now, and was held at most, of each resource in each ring."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.used = {resource: [0] * RINGS for resource in KNOBS}
        self.high_water = {resource: [0] * RINGS for resource in KNOBS}

    def fits(self, resource: str, ring: int, amount: int) -> bool:
        """Whether `amount` more would be within the limit."""
        return self.used[resource][ring] + amount <= self.limits.of(resource)[ring]

    def error(self, resource: str, ring: int, amount: int) -> CapacityError:
        """Make the error for `amount` more."""
        used, limit = self.used[resource][ring], self.limits.of(resource)[ring]
        return CapacityError(resource, ring, used, amount, limit)

    def take(self, resource: str, ring: int, amount: int) -> None:
        """Hold `amount` more, or with a negative one less."""
        used = self.used[resource]
        used[ring] += amount
        self.high_water[resource][ring] = max(self.high_water[resource][ring], used[ring])


def _four(field: str, value: str | int) -> tuple[int, ...]:
    allowed = f"one positive number, or {RINGS} with commas between them, for the depths of scopes"
    try:
        found: Sequence[int] = [parse_size(part) for part in str(value).split(",")]
    except ValueError as error:
        raise ConfigError(field, value, f"{allowed} ({error})") from error
    if len(found) not in (1, RINGS) or min(found) <= 0:
        raise ConfigError(field, value, allowed)
    return tuple(found) if len(found) == RINGS else tuple(found) * RINGS
