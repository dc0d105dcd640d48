"""Passes that put several named ops into one, by name and in the order in which they run.

What an eps, a size or a number of heads is comes from the graph that a pass meets, never from its text.
"""

from collections.abc import Callable

from piecework.graph.passes.base import Pass
from piecework.graph.passes.fusions.copies import erase_copy
from piecework.graph.passes.fusions.gate import silu_mul_dynamic_quant, silu_mul_quant
from piecework.graph.passes.fusions.norm import (
    add_rms_norm,
    add_rms_norm_dynamic_quant,
    add_rms_norm_quant,
    rms_norm_dynamic_quant,
    rms_norm_quant,
)
from piecework.graph.passes.fusions.qkv import split_qkv_rmsnorm_rope, split_qkv_rope
from piecework.graph.passes.fusions.reciprocal import div_fuse

FUSIONS: dict[str, Callable[[], Pass]] = {
    "split_qkv_rmsnorm_rope": split_qkv_rmsnorm_rope,
    "split_qkv_rope": split_qkv_rope,
    # The longer chains first: what is left of them is what the shorter ones may have.
    "add_rms_norm_quant": add_rms_norm_quant,
    "add_rms_norm_dynamic_quant": add_rms_norm_dynamic_quant,
    "rms_norm_quant": rms_norm_quant,
    "rms_norm_dynamic_quant": rms_norm_dynamic_quant,
    "silu_mul_quant": silu_mul_quant,
    "silu_mul_dynamic_quant": silu_mul_dynamic_quant,
    "add_rms_norm": add_rms_norm,
    "div_fuse": div_fuse,
    "erase_copy": erase_copy,
}
"""Every fusion by its name; which of them run without being asked for is in `sets`."""

__all__ = ["FUSIONS", *FUSIONS]
