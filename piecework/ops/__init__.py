"""The named ops that models are built from. Importing this package registers them with torch."""

from piecework.ops import (
    activation,
    attention,
    attention_int8,
    block_linear,
    coded_linear,
    collective,
    fused_gate,
    fused_norm,
    fused_qkv,
    int8_linear,
    linear,
    moe,
    norm,
    quantize,
    rotary,
)
from piecework.ops import cpu as cpu
from piecework.ops import cuda as cuda
from piecework.ops import npu as npu
from piecework.ops import sim as sim
from piecework.ops import triton as triton
from piecework.ops.registry import Implementation, Op, UnsupportedOpError, define, get, names

__all__ = [
    "Implementation",
    "Op",
    "UnsupportedOpError",
    "activation",
    "attention",
    "attention_int8",
    "block_linear",
    "coded_linear",
    "collective",
    "define",
    "fused_gate",
    "fused_norm",
    "fused_qkv",
    "get",
    "int8_linear",
    "linear",
    "moe",
    "names",
    "norm",
    "quantize",
    "rotary",
]
