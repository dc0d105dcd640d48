"""Tiny models with int8 layers, and small graphs around one fusion, for the tests of fusion passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from pass_graphs import OPS, function_graph, random_model
from torch import Tensor
from torch.fx import GraphModule

from piecework.graph.passes import PassManager, PassReport
from piecework.graph.passes.fusions import FUSIONS
from piecework.layers.int8 import StaticInput, W8A8Linear
from piecework.layers.linear import Linear
from piecework.layers.moe import MoE
from piecework.models.decoder import CausalLM

EPS = 1e-5
SCHEMES = (None, "dynamic", "static")


def int8_model(
    name: str, scheme: str | None, *, offset: int = 0, keep: str = "", **overrides: Any
) -> CausalLM:
    """A tiny random model whose linears below its layers are W8A8; those whose name ends in `keep` float."""
    model = random_model(name, **overrides)
    if scheme is None:
        return model
    static = StaticInput(0.02, offset) if scheme == "static" else None
    for layer in model.model.layers:
        for path, module in list(layer.named_modules()):
            parent, _, last = path.rpartition(".")
            owner = layer.get_submodule(parent)
            if isinstance(module, Linear) and not isinstance(owner, MoE) and not (keep and last == keep):
                setattr(owner, last, _int8(module, static))
    return model


def _int8(linear: Linear, static: StaticInput | None) -> W8A8Linear:
    weight = linear.weight.float()
    scale = weight.abs().amax(-1) / 127
    rounded = (weight / scale[:, None]).round().to(torch.int8)
    quant_bias = None
    if static is not None:
        quant_bias = (-static.offset * rounded.sum(-1)).to(torch.int32)
        scale = scale * static.scale
    sizes = getattr(linear, "sizes", ())
    return W8A8Linear(
        rounded,
        scale,
        dtype=linear.weight.dtype,
        bias=linear.bias,
        sizes=sizes,
        static=static,
        quant_bias=quant_bias,
    )


@dataclass(frozen=True)
class Case:
    """What a fusion replaces, as a function, and the inputs it takes: shapes with "T", or tensors."""

    name: str
    fn: Callable[..., Any]
    before: tuple[str, ...]
    after: str


def _add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    total = residual + x
    return OPS.rms_norm(total, weight, EPS), total


def _norm_static(x: Tensor, weight: Tensor, scale: Tensor, reciprocal: Tensor) -> Any:
    return OPS.quantize(OPS.rms_norm(x, weight, EPS), scale, reciprocal)


def _norm_dynamic(x: Tensor, weight: Tensor) -> Any:
    return OPS.dynamic_quantize(OPS.rms_norm(x, weight, EPS))


def _add_norm_static(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, reciprocal: Tensor) -> Any:
    y, total = _add_norm(x, residual, weight)
    return OPS.quantize(y, scale, reciprocal), total


def _add_norm_offset(
    x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, reciprocal: Tensor, offset: Tensor
) -> Any:
    y, total = _add_norm(x, residual, weight)
    return OPS.quantize(y, scale, reciprocal, offset), total


def _add_norm_dynamic(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    y, total = _add_norm(x, residual, weight)
    return *OPS.dynamic_quantize(y), total


def _gate_static(x: Tensor, scale: Tensor, reciprocal: Tensor) -> Any:
    return OPS.quantize(OPS.silu_and_mul(x), scale, reciprocal)


def _gate_dynamic(x: Tensor) -> Any:
    return OPS.dynamic_quantize(OPS.silu_and_mul(x))


_ADD_NORM = ("aten::add", "piecework::rms_norm")
_STATIC, _DYNAMIC = ("piecework::quantize",), ("piecework::dynamic_quantize",)
_NORM, _GATE = ("piecework::rms_norm",), ("piecework::silu_and_mul",)

CASES = {
    case.name: case
    for case in (
        Case("add_rms_norm", _add_norm, _ADD_NORM, "add_rms_norm"),
        Case("rms_norm_quant", _norm_static, _NORM + _STATIC, "rms_norm_quant"),
        Case("rms_norm_dynamic_quant", _norm_dynamic, _NORM + _DYNAMIC, "rms_norm_dynamic_quant"),
        Case("add_rms_norm_quant", _add_norm_static, _ADD_NORM + _STATIC, "add_rms_norm_quant"),
        Case("add_rms_norm_quant/offset", _add_norm_offset, _ADD_NORM + _STATIC, "add_rms_norm_quant"),
        Case(
            "add_rms_norm_dynamic_quant",
            _add_norm_dynamic,
            _ADD_NORM + _DYNAMIC,
            "add_rms_norm_dynamic_quant",
        ),
        Case("silu_mul_quant", _gate_static, _GATE + _STATIC, "silu_mul_quant"),
        Case("silu_mul_dynamic_quant", _gate_dynamic, _GATE + _DYNAMIC, "silu_mul_dynamic_quant"),
    )
}


def inputs(case: Case, tokens: int, hidden: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Random values for a case's function, by the names of its parameters."""
    generator = torch.Generator().manual_seed(seed)
    width = 2 * hidden if case.name.startswith("silu") else hidden
    made: list[Tensor] = []
    names = case.fn.__code__.co_varnames[: case.fn.__code__.co_argcount]
    for name in names:
        if name in ("x", "residual"):
            made.append(torch.randn(tokens, width, generator=generator).to(dtype))
        elif name == "weight":
            made.append((1 + 0.3 * torch.randn(hidden, generator=generator)).to(dtype))
        else:
            made.append(torch.tensor([{"scale": 0.03, "reciprocal": 1 / 0.03, "offset": 3.0}[name]]))
    return made


def case_graph(case: Case, hidden: int = 16, dtype: torch.dtype = torch.float32) -> GraphModule:
    """The case's graph, for any token count."""
    shapes: list[Any] = [
        ("T", *tensor.shape[1:]) if tensor.dim() == 2 else tensor for tensor in inputs(case, 1, hidden, dtype)
    ]
    return function_graph(case.fn, *shapes, dtype=dtype)


def fuse(module: GraphModule, *names: str, verify: bool = True) -> list[PassReport]:
    """Run fusions by name and return what they did."""
    manager = PassManager(module, verify=verify)
    for name in names:
        manager.add(FUSIONS[name])
    report = manager.apply(expectations=False)
    return [report[name] for name in names]
