"""What is killed when: the same for a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Kill:
    """After `delay` seconds, the server or the child of this number, counted among those that are ready."""

    server: bool
    delay: float
    number: int


def make_schedule(kills: int, seed: int, server_share: float = 0.05) -> list[Kill]:
    """Draw kills; of 20 about one is of the server, which takes all children along."""
    draw = random.Random(seed)
    servers = max(1, round(kills * server_share)) if kills > 1 else 0
    kinds = [True] * servers + [False] * (kills - servers)
    draw.shuffle(kinds)
    return [Kill(server, draw.uniform(0.0, 0.5), draw.randrange(1000)) for server in kinds]
