"""What a device of OpenVINO wants pieces to look like, and the hints that they are compiled with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from piecework.compile.base import CompileContext
from piecework.devices.openvino import DEFAULT, OpenVinoDevice, capabilities, core


@dataclass(frozen=True)
class Layout:
    """How a piece is laid out for a device.

    Attributes:
        weights: `constants` makes one model of each call of a piece, with that call's weights inside;
            `inputs` one model of all calls, which are handed their weights.
        sizes: `open` leaves the number of tokens open; `fixed` makes one model for each power of two.
        kept: compiled models are kept on disk. One with constants is as large as they are.
    """

    weights: Literal["constants", "inputs"] = "constants"
    sizes: Literal["open", "fixed"] = "open"
    kept: bool = True


def layout(target: str) -> Layout:
    """Return the layout for OpenVINO's device `target`; docs/openvino.md has the measurements.

    A CPU packs constant weights for its kernels when it compiles, else at each run; a kept model would be as
    large as the weights and save half of a compilation that takes 80 ms. An NPU compiles for seconds and for
    fixed sizes only, and has no memory for the same weights once per size.
    """
    kind = target.partition(".")[0]
    if kind == "NPU":
        return Layout("inputs", "fixed")
    return Layout(kept=kind != DEFAULT)


def target_of(context: CompileContext) -> str:
    """Return the name that OpenVINO has for the context's device; for the host's own it is its CPU."""
    device = context.device
    return device.target if isinstance(device, OpenVinoDevice) else DEFAULT


def properties(piece: fx.GraphModule, context: CompileContext) -> dict[str, Any]:
    """Return what a piece is compiled with: the run's precision and threads, one stream, and what a user set.

    Steps run one after the other, so a second stream would have nothing to do.
    """
    target = target_of(context)
    supported = set(core().get_property(target, "SUPPORTED_PROPERTIES"))
    wanted: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "ENABLE_CPU_PINNING": False,  # the host's own threads run between pieces, on the same cores
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,  # activations are quantised where the model says so, only there
        "INFERENCE_PRECISION_HINT": _precision(piece, target),
    }
    hints = {name: value for name, value in wanted.items() if name in supported and value is not None}
    device = context.device
    given: Mapping[str, str] = device.properties if isinstance(device, OpenVinoDevice) else {}
    return {**hints, **given}


def _precision(piece: fx.GraphModule, target: str) -> str | None:
    """The precision of all of the piece's results where the device computes in it, else float32 if it can."""
    (output,) = piece.graph.find_nodes(op="output")
    results = [node.meta["val"].dtype for node in output.args[0]]
    has = capabilities(target)
    names = {torch.bfloat16: ("BF16", "bf16"), torch.float16: ("FP16", "f16")}
    floats = {dtype for dtype in results if dtype.is_floating_point}
    if len(floats) == 1 and (dtype := floats.pop()) in names and names[dtype][0] in has:
        return names[dtype][1]
    return "f32" if "FP32" in has else None
