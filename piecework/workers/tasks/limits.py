"""How much an orchestration may hold at once, and the error where it wants more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from piecework.config.rings import RINGS, ring_limits
from piecework.errors import PieceworkError

Setting = str | int | Sequence[str | int]
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
    def parse(cls, heap: Setting, task_window: Setting, dep_pool: Setting, timeout: float = 10.0) -> Limits:
        """Read limits as settings give them, see `ring_limits`."""
        return cls(
            ring_limits("ring_heap", heap),
            ring_limits("ring_task_window", task_window),
            ring_limits("ring_dep_pool", dep_pool),
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

    def clear(self) -> None:
        """Hold nothing, as before an orchestration; one that was interrupted gave nothing back."""
        self.used = {resource: [0] * RINGS for resource in KNOBS}

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
