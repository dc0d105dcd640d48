"""What is used of torch_npu: every function with its arguments, in one table that makes the calls.

The names are those of the schemas in the wheel (torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml),
where all functions stand that torch_npu exports. Types may differ between releases: a dtype is `ScalarType`
in some and `int` in others, and torch takes a torch.dtype for both.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor

PACKAGE = "torch_npu"


@dataclass(frozen=True)
class Function:
    """A function of torch_npu as it is called here.

    `positional` are passed by position and `keywords` by name; all others keep their defaults. Of these,
    `defaults` are the ones that change what a result means. `results` is the number of tensors returned.
    """

    positional: tuple[str, ...]
    keywords: tuple[str, ...] = ()
    results: int = 1
    defaults: Mapping[str, Any] = field(default_factory=dict)


FUNCTIONS: dict[str, Function] = {
    # -> y, reciprocal of the root mean square
    "npu_rms_norm": Function(("self", "gamma"), ("epsilon",), results=2),
    # -> y, reciprocal of the root mean square, x1 + x2
    "npu_add_rms_norm": Function(("x1", "x2", "gamma"), ("epsilon",), results=3),
    # It divides by scales1 (div_mode), so it takes the scale and not its reciprocal. -> y, unused, x1 + x2
    "npu_add_rms_norm_quant": Function(
        ("x1", "x2", "gamma", "scales1", "zero_points1"),
        ("epsilon",),
        results=3,
        defaults={"div_mode": True, "axis": -1, "beta": None, "scales2": None, "zero_points2": None},
    ),
    # -> y, unused, x1 + x2, scale of y, unused
    "npu_add_rms_norm_dynamic_quant": Function(
        ("x1", "x2", "gamma"),
        ("epsilon",),
        results=5,
        defaults={"smooth_scale1": None, "smooth_scale2": None, "beta": None},
    ),
    # div_mode=False multiplies with scales, so it takes the reciprocal, and zero_points in its dtype.
    "npu_quantize": Function(("self", "scales", "zero_points", "dtype", "axis", "div_mode")),
    # -> y, scale without the last dimension
    "npu_dynamic_quant": Function(("input",), results=2, defaults={"smooth_scales": None}),
    "npu_quant_matmul": Function(
        ("x1", "x2", "scale"), ("pertoken_scale", "bias", "output_dtype"), defaults={"offset": None}
    ),
    "npu_weight_quant_batchmatmul": Function(
        ("x", "weight", "antiquant_scale"),
        defaults={"antiquant_offset": None, "bias": None, "antiquant_group_size": 0},
    ),
    # One product per group of rows; group_list are the ends of the groups. -> a list of one
    "npu_grouped_matmul": Function(
        ("x", "weight"),
        ("group_list", "split_item", "group_type", "group_list_type"),
        defaults={"bias": None, "scale": None, "act_type": 0, "output_dtype": None},
    ),
    "npu_swiglu": Function(("self", "dim")),
    "npu_rotary_mul": Function(("self", "r1", "r2", "rotary_mode")),
    # -> attention, log of the sum of exponentials
    "npu_fused_infer_attention_score": Function(
        ("query", "key", "value"),
        (
            "atten_mask",
            "actual_seq_lengths",
            "actual_seq_lengths_kv",
            "block_table",
            "num_heads",
            "scale",
            "input_layout",
            "num_key_value_heads",
            "sparse_mode",
            "block_size",
        ),
        results=2,
        defaults={"softmax_lse_flag": False, "inner_precise": 0},
    ),
}

MAPPING: dict[str, tuple[str, ...]] = {
    "rms_norm": ("npu_rms_norm",),
    "add_rms_norm": ("npu_add_rms_norm",),
    "rms_norm_quant": ("npu_rms_norm", "npu_quantize"),
    "rms_norm_dynamic_quant": ("npu_rms_norm", "npu_dynamic_quant"),
    "add_rms_norm_quant": ("npu_add_rms_norm_quant",),
    "add_rms_norm_dynamic_quant": ("npu_add_rms_norm_dynamic_quant",),
    "quantize": ("npu_quantize",),
    "dynamic_quantize": ("npu_dynamic_quant",),
    "linear_w8a8": ("npu_quant_matmul",),
    "linear_w8": ("npu_weight_quant_batchmatmul",),
    "moe": ("npu_grouped_matmul", "npu_swiglu"),
    "silu_and_mul": ("npu_swiglu",),
    "silu_mul_quant": ("npu_swiglu", "npu_quantize"),
    "silu_mul_dynamic_quant": ("npu_swiglu", "npu_dynamic_quant"),
    "rotary": ("npu_rotary_mul",),
    "split_qkv_rope": ("npu_rotary_mul",),
    "split_qkv_rmsnorm_rope": ("npu_rms_norm", "npu_rotary_mul"),
    "paged_attention": ("npu_fused_infer_attention_score",),
}
"""Which functions each named op of this project is made of."""


def call(function: str, **arguments: Any) -> tuple[Tensor, ...]:
    """Call a function of the table and return its results, of one too.

    `arguments` are those that the table lists, each once; anything else is a TypeError.
    """
    entry = FUNCTIONS[function]
    expected = {*entry.positional, *entry.keywords}
    if set(arguments) != expected:
        odd = ", ".join(sorted(set(arguments) ^ expected))
        raise TypeError(f"{function} is called with other arguments than its table lists: {odd}")
    run = getattr(import_module(PACKAGE), function)
    positional = [arguments[name] for name in entry.positional]
    found = run(*positional, **{name: arguments[name] for name in entry.keywords})
    return (found,) if isinstance(found, Tensor) else tuple(found)


def available() -> bool:
    """Say whether torch_npu can be imported, without importing it."""
    return sys.modules.get(PACKAGE) is not None or _installed(PACKAGE)


@cache
def ascend_triton() -> bool:
    """Say whether the installed triton is triton-ascend, which has a backend for NPUs."""
    return _installed("triton") and _installed("triton.backends.ascend")


@cache
def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ImportError:
        return False
