"""Which fusions run by default, and how often each should match in a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from piecework.graph.passes.base import Expectation
from piecework.models.config import ModelConfig

Scheme = Literal["static", "dynamic"]
"""How the int8 input of a product gets its scale: known before the run, or of each token at run time."""

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
    # Nothing to win there: they run so that graphs are tested with them.
    ("sim", _32): _ALL,
    ("sim", _16): _ALL,
}
"""On other devices, and in other dtypes, none. What stands nowhere here is off until it is asked for."""


def default_fusions(device: str, dtype: torch.dtype | None) -> frozenset[str]:
    """The fusions that win on a device in a dtype; dtype None (not known yet) takes those for any."""
    found = [
        names for (kind, dtypes), names in DEFAULT.items() if kind == device and dtype in (None, *dtypes)
    ]
    return frozenset.intersection(*found) if found else frozenset()


@dataclass(frozen=True)
class LayerInputs:
    """How the inputs of one layer's products are quantised; None is not at all.

    `qkv` and `mlp` come from norms, `down` from the gate. Experts have none of the latter two.
    """

    qkv: Scheme | None = None
    mlp: Scheme | None = None
    down: Scheme | None = None


@dataclass(frozen=True)
class Structure:
    """What there is to fuse in a model.

    Attributes:
        layers: how each layer's inputs are quantised, by layer.
        dense: by layer whether it has a gate of its own, and no experts.
        qk_norm: queries and keys are normalised per head.
    """

    layers: tuple[LayerInputs, ...]
    dense: tuple[bool, ...]
    qk_norm: bool

    @classmethod
    def of(cls, model: ModelConfig, inputs: Sequence[LayerInputs] | None = None) -> Structure:
        """Read it off a model's configuration; `inputs` has one entry per layer, None: all are float."""
        layers = tuple(inputs) if inputs is not None else (LayerInputs(),) * model.num_layers
        dense = tuple(not model.is_moe(layer) for layer in range(model.num_layers))
        return cls(layers, dense, model.qk_norm)

    @property
    def norms(self) -> list[tuple[bool, Scheme | None]]:
        """Every norm of a residual: whether a sum stands before it, and how its result is quantised."""
        found: list[tuple[bool, Scheme | None]] = []
        for index, (layer, dense) in enumerate(zip(self.layers, self.dense, strict=True)):
            found += [(index > 0, layer.qkv), (True, layer.mlp if dense else None)]
        return [*found, (True, None)]

    def matches(self, names: Sequence[str]) -> dict[str, int]:
        """How often each of the fusions `names` matches where they run in this order."""
        counts = dict.fromkeys(names, 0)
        for added, scheme in self.norms:
            taken = next((name for name in names if _takes_norm(name, added, scheme)), None)
            if taken is not None:
                counts[taken] += 1
        attends = "split_qkv_rmsnorm_rope" if self.qk_norm else "split_qkv_rope"
        gates = [layer.down for layer, dense in zip(self.layers, self.dense, strict=True) if dense]
        fixed = {
            attends: len(self.layers),
            "silu_mul_quant": gates.count("static"),
            "silu_mul_dynamic_quant": gates.count("dynamic"),
        }
        return counts | {name: number for name, number in fixed.items() if name in counts}


_NORMS: dict[str, tuple[bool, Scheme | None]] = {
    "add_rms_norm": (True, None),
    "rms_norm_quant": (False, "static"),
    "rms_norm_dynamic_quant": (False, "dynamic"),
    "add_rms_norm_quant": (True, "static"),
    "add_rms_norm_dynamic_quant": (True, "dynamic"),
}


def _takes_norm(name: str, added: bool, scheme: Scheme | None) -> bool:
    """Whether a fusion matches a norm: all that it needs has to be there; it may leave the rest alone."""
    if name not in _NORMS:
        return False
    needs_sum, needs_scheme = _NORMS[name]
    return (added or not needs_sum) and needs_scheme in (None, scheme)


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
