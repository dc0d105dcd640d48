"""How an op becomes one kernel of `sim`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from piecework.ops.registry import Op

_library = torch.library.Library("piecework_sim", "DEF")


def kernel(op: Op, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register `run` as a single operation with the schema of `op`, and as the op's implementation `sim`."""
    _library.define(op.schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(op.name, run, "CPU")
    torch.library.register_fake(f"piecework_sim::{op.name}", fake, lib=_library)
    op.implement("sim")(getattr(torch.ops.piecework_sim, op.name).default)
