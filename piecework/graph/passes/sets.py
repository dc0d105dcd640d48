"""Which fusions run by default, and what is expected of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from piecework.graph.passes.base import Expectation
from piecework.graph.passes.structure import Structure

_FLOAT = ("split_qkv_rmsnorm_rope", "split_qkv_rope", "add_rms_norm")
_STATIC = ("add_rms_norm_quant", "rms_norm_quant", "silu_mul_quant")
_DYNAMIC = ("add_rms_norm_dynamic_quant", "rms_norm_dynamic_quant", "silu_mul_dynamic_quant")
_ALL = frozenset(_FLOAT + _STATIC + _DYNAMIC)

_16 = (torch.bfloat16, torch.float16)
_32 = (torch.float32,)

DEFAULT: dict[tuple[str, tuple[torch.dtype, ...]], frozenset[str]] = {
    # device, dtypes: the fusions that run without being asked for.
    ("cpu", _32): _ALL,
    ("cpu", _16): _ALL,
    ("cuda", _32): _ALL,
    ("cuda", _16): _ALL,
    # The vendor's library has no op for split, norms and rotary at once.
    ("npu", _32): _ALL - {"split_qkv_rmsnorm_rope", "split_qkv_rope"},
    ("npu", _16): _ALL - {"split_qkv_rmsnorm_rope", "split_qkv_rope"},
    # A converter writes an op out, whether it is a fused one or not.
    ("openvino", _32): _ALL,
    ("openvino", _16): _ALL,
    # Nothing to win there: they run so that graphs are tested with them.
    ("sim", _32): _ALL,
    ("sim", _16): _ALL,
}
"""On other devices, and in other dtypes, none. What stands nowhere here is off until it is asked for."""


def default_fusions(device: str, dtype: torch.dtype | None) -> frozenset[str]:
    """The fusions that win on a device (`cpu`, `cuda:1`) in a dtype; None takes those that do in all."""
    wanted = device.partition(":")[0]
    found = [names for (kind, of), names in DEFAULT.items() if kind == wanted and dtype in (None, *of)]
    return frozenset.intersection(*found) if found else frozenset()


@dataclass(frozen=True)
class FusionPlan:
    """The fusions of a graph: which run by default, and how often they should match.

    Attributes:
        wins: names of those that win on the device.
        structure: of the model; None for a graph of which nothing is known.
    """

    wins: frozenset[str]
    structure: Structure | None = None

    @classmethod
    def of(cls, device: str, dtype: torch.dtype | None, structure: Structure | None = None) -> FusionPlan:
        """Plan for a device's name, the weights' dtype, and what the model is."""
        return cls(default_fusions(device, dtype), structure)

    def chosen(self, order: Sequence[str], disabled: Iterable[str] = ()) -> list[str]:
        """The fusions of `order` that run by default: they win, and the model has a place for them.

        Where one is disabled, another may get its places; the disabled one is still listed.
        """
        winning = [name for name in order if name in self.wins]
        if self.structure is None:
            return winning
        active = [name for name in winning if name not in set(disabled)]
        counts = [self.structure.matches(names) for names in (winning, active)]
        return [name for name in winning if any(found.get(name) for found in counts)]

    def expected(self, names: Sequence[str], asked: bool) -> dict[str, Expectation]:
        """What to expect of fusions that run in this order, `asked` for by name or else `chosen`.

        One for which the model has no place is left out: its own expectation stands, and is missed.
        """
        if self.structure is None:
            return {} if asked else dict.fromkeys(names)
        return {name: count for name, count in self.structure.matches(names).items() if count}
