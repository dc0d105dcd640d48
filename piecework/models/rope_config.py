"""Rotary position embedding as config.json describes it, in the old form and in the new one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from piecework.models.fields import Fields

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DEFAULT_THETA = 10000.0


@dataclass(frozen=True)
class RopeConfig:
    """Base and scaling of the rotary frequencies; `piecework.layers.rotary` has the formulas.

    Attributes:
        theta: the base.
        type: one of `ROPE_TYPES`.
        partial_factor: the share of each head that is rotated.
        factor: how many times longer the context is made (all types but default).
        original_max_position: context length of the training before scaling (llama3, yarn).
        low_freq_factor, high_freq_factor: bounds of the llama3 type.
        attention_factor: multiplies cosine and sine (yarn); None: from factor and the mscales.
        mscale, mscale_all_dim: yarn as DeepSeek has it; 0 where not given.
        beta_fast, beta_slow, truncate: bounds of yarn's ramp, and whether they are rounded.
    """

    theta: float = DEFAULT_THETA
    type: str = "default"
    partial_factor: float = 1.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


def read_rope(config: Fields, max_position: int) -> RopeConfig:
    """Read `rope_theta` and `rope_scaling` (old form) or `rope_parameters` (transformers 5).

    A value inside the dictionary wins over one beside it, as in transformers' `modeling_rope_utils`.
    Dynamic and long rope, multimodal rope and dictionaries per layer type are refused by name.
    """
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    scaling = config.get(key) or {}
    if not isinstance(scaling, Mapping):
        raise config.error(key, "a mapping")
    nested = [name for name, value in scaling.items() if isinstance(value, Mapping)]
    if nested:
        raise config.error(key, f"one set for all layers, not one for each of {', '.join(nested)}")
    if config.flag("use_mrope"):
        raise config.error("use_mrope", "false: multimodal rotary embedding is not supported")
    fields = Fields(
        {
            "rope_theta": config.get("rope_theta"),
            "partial_rotary_factor": config.get("partial_rotary_factor"),
            **{name: value for name, value in scaling.items() if value is not None},
        },
        where=f"{key}.",
    )
    return _read(fields, config, max_position)


def _read(fields: Fields, config: Fields, max_position: int) -> RopeConfig:
    name = "rope_type" if fields.get("rope_type") is not None else "type"
    kind = fields.get(name) or "default"
    if kind not in ROPE_TYPES:
        raise fields.error(name, "one of " + ", ".join(ROPE_TYPES))
    if fields.get("mrope_section") is not None:
        raise fields.error("mrope_section", "not given: multimodal rotary embedding is not supported")
    known: dict[str, Any] = {
        "type": kind,
        "theta": fields.number("rope_theta", DEFAULT_THETA),
        "partial_factor": fields.number("partial_rotary_factor", 1.0),
    }
    if known["partial_factor"] > 1:
        raise fields.error("partial_rotary_factor", "a number above 0 and at most 1")
    if kind == "linear":
        known["factor"] = fields.number("factor")
    elif kind in ("llama3", "yarn"):
        known.update(_scaled(kind, fields, config, max_position))
    return RopeConfig(**known)


def _scaled(kind: str, fields: Fields, config: Fields, max_position: int) -> dict[str, Any]:
    # Beside the dictionary it wins, the one exception from the rule: transformers does so for Phi-3.
    beside = "original_max_position_embeddings"
    source = config if config.get(beside) is not None else fields
    original = source.integer(beside, max_position)
    if kind == "llama3":
        low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
        if low >= high:
            raise fields.error("low_freq_factor", f"less than high_freq_factor, which is {high}")
        return {
            "factor": fields.number("factor"),
            "original_max_position": original,
            "low_freq_factor": low,
            "high_freq_factor": high,
        }
    given = fields.get("attention_factor")
    return {
        "factor": fields.number("factor", max_position / original),
        "original_max_position": original,
        "attention_factor": None if given is None else fields.number("attention_factor"),
        "mscale": fields.number("mscale", 0.0, or_zero=True),
        "mscale_all_dim": fields.number("mscale_all_dim", 0.0, or_zero=True),
        "beta_fast": fields.number("beta_fast", 32.0),
        "beta_slow": fields.number("beta_slow", 1.0),
        "truncate": fields.flag("truncate", True),
    }
