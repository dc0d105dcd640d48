"""`moe` on the simulated accelerator."""

from __future__ import annotations

from piecework.ops.cpu.moe import moe_grouped
from piecework.ops.moe import moe, moe_fake
from piecework.ops.sim.kernel import kernel

kernel(moe, moe_grouped, moe_fake)
