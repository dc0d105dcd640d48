"""The `quantization_config` of a compressed-tensors checkpoint: which linear is quantised, and how.

Fields: https://github.com/vllm-project/compressed-tensors, `quantization/quant_config.py`, `quant_args.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from piecework.errors import ModelError
from piecework.quantization.reader import Scheme

FORMATS = ("int-quantized", "naive-quantized", "pack-quantized")
# What transformers and vLLM call a linear layer; a target may be a class.
_CLASSES = ("Linear",)


@dataclass(frozen=True)
class Group:
    """One of `config_groups`: the scheme of the linears that `targets` name.

    `packed`: four int8 values lie in an int32. `per_channel`: a scale for each output, else one for all.
    """

    targets: tuple[str, ...]
    scheme: Scheme
    packed: bool
    per_channel: bool
    input_symmetric: bool


@dataclass(frozen=True)
class Groups:
    """All groups and what they leave out."""

    groups: tuple[Group, ...]
    ignore: tuple[str, ...]

    def find(self, linear: str) -> Group | None:
        """Return the group of a linear: one that has its name, else a pattern, else its class."""
        if any(_matches(target, linear) for target in self.ignore) or set(self.ignore) & set(_CLASSES):
            return None
        ranks = (
            lambda target: target == linear,
            lambda target: _matches(target, linear),
            lambda target: target in _CLASSES,
        )
        for rank in ranks:
            for group in self.groups:
                if any(rank(target) for target in group.targets):
                    return group
        return None


def _matches(target: str, linear: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), linear) is not None
    return target == linear


def read_groups(values: Mapping[str, Any], where: str) -> Groups:
    """Read a quantization_config; ModelError names the field that is wrong or not supported."""
    stated = _Fields(values, f"{where}: quantization_config")
    if stated.get("kv_cache_scheme") is not None:
        raise stated.error("kv_cache_scheme", "null: the KV cache is not quantised")
    sparsity = stated.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise stated.error("sparsity_config", "one of format dense, or none")
    if stated.get("transform_config"):
        raise stated.error("transform_config", "empty: rotations of activations are not supported")
    groups = stated.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise stated.error("config_groups", "a mapping of at least one group")
    found = []
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            raise stated.error(f"config_groups.{name}", "a mapping")
        fields = _Fields(group, f"{stated.where}.config_groups.{name}")
        found.append(_group(fields, group.get("format") or stated.get("format")))
    return Groups(tuple(found), _patterns(stated, "ignore", ()))


class _Fields:
    """A part of the config, and how to complain about it."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def error(self, name: str, allowed: str) -> ModelError:
        return ModelError(f"{self.where}.{name}={self.values.get(name)!r} is not supported: {allowed}")

    def part(self, name: str) -> _Fields | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(name, "a mapping")
        return _Fields(value, f"{self.where}.{name}")

    def expect(self, name: str, allowed: Sequence[Any], default: Any = None) -> Any:
        value = self.get(name, default)
        if value not in allowed or isinstance(value, bool) != isinstance(allowed[0], bool):
            raise self.error(name, "one of " + ", ".join(str(one) for one in allowed))
        return value


def _patterns(fields: _Fields, name: str, default: Sequence[str]) -> tuple[str, ...]:
    found = fields.get(name, default)
    if not isinstance(found, list | tuple) or not all(isinstance(one, str) for one in found):
        raise fields.error(name, "a list of names, classes and re:patterns")
    for pattern in found:
        if pattern.startswith("re:"):
            try:
                re.compile(pattern.removeprefix("re:"))
            except re.error as error:
                raise fields.error(name, f"patterns that compile ({pattern}: {error})") from error
    return tuple(found)


def _group(fields: _Fields, layout: Any) -> Group:
    if layout not in FORMATS:
        known = ", ".join(FORMATS)
        raise ModelError(f"{fields.where}: format={layout!r} is not supported: one of {known}")
    weights, inputs = fields.part("weights"), fields.part("input_activations")
    if weights is None:
        raise fields.error("weights", "int8 weights")
    if fields.get("output_activations") is not None:
        raise fields.error("output_activations", "null")
    _expect_int8(weights)
    strategy = weights.expect("strategy", ("channel", "tensor"), "tensor")
    weights.expect("symmetric", (True,), True)
    weights.expect("dynamic", (False,), False)
    packed = layout == "pack-quantized"
    scheme, symmetric = _scheme(fields, inputs)
    if packed and scheme != "w8":
        raise fields.error("input_activations", "null for pack-quantized weights")
    targets = _patterns(fields, "targets", _CLASSES)
    return Group(targets, scheme, packed, strategy == "channel", symmetric)


def _expect_int8(args: _Fields) -> None:
    args.expect("num_bits", (8,), 8)
    args.expect("type", ("int",), "int")


def _scheme(fields: _Fields, inputs: _Fields | None) -> tuple[Scheme, bool]:
    if inputs is None:
        return "w8", True
    _expect_int8(inputs)
    if inputs.expect("dynamic", (True, False), False):
        inputs.expect("strategy", ("token",))
        inputs.expect("symmetric", (True,), True)
        return "w8a8-dynamic", True
    inputs.expect("strategy", ("tensor",), "tensor")
    return "w8a8-static", bool(inputs.expect("symmetric", (True, False), True))
