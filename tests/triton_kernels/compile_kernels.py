"""Compiles every kernel for a GPU that need not be there, down to machine code; prints a line for each.

    python tests/triton_kernels/compile_kernels.py 90 bfloat16 float16

The first argument is the compute capability times ten, dtypes follow. The ops are called on tensors of
the CPU, with Triton told that a GPU is active and launches turned into compilations.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from kernel_calls import ROWWISE, rowwise
from test_triton_attention import decode_args
from test_triton_heads import norm_args, rotary_args, split_args
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import piecework.ops as ops


class AbsentGpu:
    """Says which GPU is active, and no more."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_instead(found: dict[int, Any]) -> None:
    """Turn launches into compilations, whose results go into `found` by identity."""
    run = JITFunction.run

    def warm_up(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        found[id(kernel)] = kernel
        return kernel

    JITFunction.run = warm_up


def call(name: str, *args: Any) -> None:
    ops.get(name).implementations["triton"].run(*args)


def int8(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int8)


def call_all(dtype: torch.dtype) -> None:
    """Call the ops with shapes of real models, tails included."""
    for hidden in (576, 4096):
        for name in ROWWISE:
            call(name, *rowwise(name, 3, hidden, dtype, offset=hidden == 576))
    for shape in ((2, 32, 8, 128, 128, False), (2, 9, 3, 64, 64, False), (2, 8, 2, 96, 32, True)):
        call("split_qkv_rope", *split_args(shape, dtype))
        call("split_qkv_rmsnorm_rope", *norm_args(shape, dtype, biased=shape[1] == 9))
        call("rotary", *rotary_args(shape, dtype))
    for rows, outputs, inputs in ((1, 4096, 4096), (17, 576, 1536), (64, 96, 100), (256, 4096, 4096)):
        scale, bias = torch.ones(outputs), torch.ones(outputs, dtype=dtype)
        call("linear_w8", torch.zeros(rows, inputs, dtype=dtype), int8(outputs, inputs), scale, bias)
        args = (int8(rows, inputs), int8(outputs, inputs), scale)
        call("linear_w8a8", *args, torch.ones(rows, 1), None, None, dtype)
        call("linear_w8a8", *args, None, torch.ones(outputs, dtype=torch.int32), bias, dtype)
    for heads, kv_heads, dim in ((32, 8, 128), (9, 3, 64), (8, 1, 256), (6, 2, 96)):
        sizes = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "page": 16, "dtype": dtype}
        call("paged_attention", *decode_args([4000], **sizes))  # in parts
        call("paged_attention", *decode_args([5] * 9, window=3, **sizes))


def resources(kernel: Any, capability: int) -> str:
    """What the assembler says: registers, shared memory, spills; and the widest global load."""
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    arch = f"sm_{capability}" + ("a" if capability >= 90 else "")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(kernel.asm["ptx"])
        command = [ptxas, "-v", f"-arch={arch}", source, "-o", Path(folder, "kernel.cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.search(r"(\d+) bytes spill stores", said)
    assert registers and spills, said
    loads = re.findall(r"(?:ld\.global|cp\.async)[\w.:]*", kernel.asm["ptx"])
    widest = sorted({load.removeprefix("ld.global.") for load in loads})
    metadata = kernel.metadata
    return (
        f"warps {metadata.num_warps} registers {registers[1]} spilled {spills[1]} "
        f"shared {metadata.shared} loads {' '.join(widest)}"
    )


def main(capability: int, dtypes: Sequence[str]) -> None:
    """Compile and report; see the top of the file."""
    driver.set_active(AbsentGpu(capability))
    found: dict[int, Any] = {}
    compile_instead(found)
    for dtype in dtypes:
        call_all(getattr(torch, dtype))
    for kernel in sorted(found.values(), key=lambda k: k.name):
        print(f"{kernel.name}: {resources(kernel, capability)}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
