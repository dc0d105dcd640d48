"""Describes int8 linears as compressed-tensors does in config.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from piecework.layers.linear import Linear
from piecework.models.decoder import CausalLM
from piecework.quantization.reader import Scheme
from piecework.quantization.targets import Target

_EXPERTS = r"re:.*\.experts\..*"


def quantization_config(model: CausalLM, targets: Sequence[Target], *, symmetric: bool) -> dict[str, Any]:
    """Return the quantization_config for `targets`, the linears of `model` that are int8.

    One scheme is given for the class Linear; two are given by name, since a reader may try classes first.
    `symmetric`: no static input has an offset.
    """
    by_scheme: dict[Scheme, list[str]] = {}
    for target in targets:
        by_scheme.setdefault(target.scheme, []).extend(part.linear for part in target.parts)
    groups = {
        f"group_{i}": {
            "targets": ["Linear"] if len(by_scheme) == 1 else linears,
            "weights": _args("channel", symmetric=True, dynamic=False),
            "input_activations": _inputs(scheme, symmetric),
            "output_activations": None,
        }
        for i, (scheme, linears) in enumerate(by_scheme.items())
    }
    names = {target.name for target in targets}
    floats = {
        name for name, module in model.named_modules() if isinstance(module, Linear) and name not in names
    }
    experts = [_EXPERTS] if model.config.num_experts else []
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if "w8" in by_scheme else "int-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted({"lm_head", *_unpacked(model, floats)}) + experts,
        "kv_cache_scheme": None,
    }


def _unpacked(model: CausalLM, names: set[str]) -> set[str]:
    """A packed module's name becomes those of its parts."""
    found: set[str] = set()
    for name in names:
        stem, _, own = name.rpartition(".")
        found.update(f"{stem}.{part}" if stem else part for part in model.packed_modules.get(own, (own,)))
    return found


def _args(strategy: str, *, symmetric: bool, dynamic: bool) -> dict[str, Any]:
    return {
        "num_bits": 8,
        "type": "int",
        "symmetric": symmetric,
        "strategy": strategy,
        "dynamic": dynamic,
        "group_size": None,
    }


def _inputs(scheme: Scheme, symmetric: bool) -> dict[str, Any] | None:
    if scheme == "w8":
        return None
    if scheme == "w8a8-dynamic":
        return _args("token", symmetric=True, dynamic=True)
    return _args("tensor", symmetric=symmetric, dynamic=False)
