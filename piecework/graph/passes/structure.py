"""What there is to fuse in a model: from it follows how often each fusion should match."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from piecework.layers.int8 import W8A8Linear
from piecework.layers.mlp import MLP
from piecework.models.config import ModelConfig

if TYPE_CHECKING:
    from piecework.models.decoder import CausalLM

Scheme = Literal["static", "dynamic"]
"""How the int8 input of a product gets its scale: known before the run, or of each token at run time."""


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
        """Take it from a model's configuration; `inputs` has one entry per layer, None: all are float."""
        layers = tuple(inputs) if inputs is not None else (LayerInputs(),) * model.num_layers
        dense = tuple(not model.is_moe(layer) for layer in range(model.num_layers))
        return cls(layers, dense, model.qk_norm)

    @classmethod
    def read(cls, model: CausalLM) -> Structure:
        """Read it off a model as it is, with those of its layers that quantisation has replaced."""
        return cls.of(model.config, [_inputs(layer) for layer in model.model.layers])

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


def _inputs(layer: Any) -> LayerInputs:
    """How a DecoderLayer's inputs are quantised."""
    qkv, mlp = _scheme(layer.self_attn.qkv_proj), layer.mlp
    if not isinstance(mlp, MLP):
        return LayerInputs(qkv)
    return LayerInputs(qkv, _scheme(mlp.gate_up_proj), _scheme(mlp.down_proj))


def _scheme(linear: nn.Module) -> Scheme | None:
    if not isinstance(linear, W8A8Linear):
        return None
    return "static" if linear.is_static else "dynamic"
