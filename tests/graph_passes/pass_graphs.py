"""Graphs, test-only ops and sample passes for the tests of passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tiny import tiny_config
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

import piecework.ops  # noqa: F401  registers the named ops
from piecework.graph.passes import BITWISE, Bound, PatternPass
from piecework.graph.passes.arguments import op_name
from piecework.graph.symbols import new_fake_mode, new_symbol, symbolic_sizes
from piecework.graph.trace import trace
from piecework.models.build import build_model
from piecework.models.config import ModelConfig
from piecework.models.decoder import CausalLM

MODELS = ("llama", "qwen2", "qwen3", "qwen3_moe")
OPS = torch.ops.piecework
TEST_OPS = torch.ops.passtest
_library = torch.library.Library("passtest", "DEF")


def _define(schema: str, meaning: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.split("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, meaning, "CPU")
    torch.library.register_fake(f"passtest::{name}", fake, lib=_library)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    h = residual + x
    return OPS.rms_norm(h, weight, eps), h


_define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    _add_rms_norm,
    lambda x, residual, weight, eps: (x.new_empty(x.shape), x.new_empty(x.shape)),
)


def _qkv_norm_rope(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    heads: int,
    kv_heads: int,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.split([heads * size, kv_heads * size, kv_heads * size], -1)
    q = OPS.rms_norm(q.view(-1, heads, size), q_weight, eps)
    k = OPS.rms_norm(k.view(-1, kv_heads, size), k_weight, eps)
    q, k = OPS.rotary(positions, q, k, cos_sin)
    return q, k, v.reshape(-1, kv_heads, size).clone()


def _qkv_norm_rope_fake(
    qkv: Tensor, p: Tensor, c: Tensor, qw: Tensor, kw: Tensor, eps: float, hq: int, hkv: int, d: int
) -> tuple[Tensor, Tensor, Tensor]:
    t = qkv.shape[0]
    return qkv.new_empty(t, hq, d), qkv.new_empty(t, hkv, d), qkv.new_empty(t, hkv, d)


_define(
    "qkv_norm_rope(Tensor qkv, Tensor positions, Tensor cos_sin, Tensor q_weight, Tensor k_weight, "
    "float eps, int heads, int kv_heads, int size) -> (Tensor, Tensor, Tensor)",
    _qkv_norm_rope,
    _qkv_norm_rope_fake,
)


def add_rms_norm(eps: float, bound: Bound = BITWISE, expect: Any = "each_layer") -> PatternPass:
    """add + rms_norm -> a test-only op; eps comes in through the closure."""

    def pattern(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        h = residual + x
        return OPS.rms_norm(h, weight, eps), h

    def replacement(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        return TEST_OPS.add_rms_norm(x, residual, weight, eps)

    return PatternPass(
        name="add_rms_norm",
        pattern=pattern,
        replacement=replacement,
        where=lambda m: m.same_shape("x", "residual") and m.same_dtype("x", "residual", "weight"),
        bound=bound,
        expect=expect,
    )


def qkv_norm_rope() -> PatternPass:
    """Split, two norms and rotary -> a test-only op; every size is bound from the graph."""

    def pattern(
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        eps: float,
        q_size: int,
        kv_size: int,
        heads: int,
        kv_heads: int,
        size: int,
    ) -> Any:
        q, k, v = qkv.split([q_size, kv_size, kv_size], -1)
        q = OPS.rms_norm(q.view(-1, heads, size), q_weight, eps)
        k = OPS.rms_norm(k.view(-1, kv_heads, size), k_weight, eps)
        q, k = OPS.rotary(positions, q, k, cos_sin)
        return q, k, v.view(-1, kv_heads, size)

    def replacement(
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        eps: float,
        q_size: int,
        kv_size: int,
        heads: int,
        kv_heads: int,
        size: int,
    ) -> Any:
        return TEST_OPS.qkv_norm_rope(qkv, positions, cos_sin, q_weight, k_weight, eps, heads, kv_heads, size)

    return PatternPass(name="qkv_norm_rope", pattern=pattern, replacement=replacement, expect="each_layer")


def random_model(name: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> CausalLM:
    """A tiny model of ours with random weights."""
    config = ModelConfig.from_dict(tiny_config(name, **overrides).to_dict())
    model = build_model(config, dtype=dtype, device="cpu", max_positions=64)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def model_graph(model: CausalLM) -> GraphModule:
    """The graph of a model's body, for any token count."""
    return trace(model, [torch.arange(5), torch.arange(5)], names=["input_ids", "positions"]).graph_module


def function_graph(fn: Callable[..., Any], *shapes: Any, dtype: torch.dtype = torch.float32) -> GraphModule:
    """The graph of a function of tensors; "T" in a shape is the token count, a tensor is its own example."""
    mode = new_fake_mode()
    with symbolic_sizes(), torch.no_grad():
        tokens = new_symbol(mode, "tokens")
        with mode:
            inputs = [
                s
                if isinstance(s, torch.dtype)
                else torch.empty([tokens if n == "T" else n for n in s], dtype=dtype)
                if not isinstance(s, Tensor)
                else torch.empty(s.shape, dtype=s.dtype)
                for s in shapes
            ]
            return make_fx(fn, pre_dispatch=True)(*inputs)


def calls(module: GraphModule, name: str) -> list[Node]:
    """The nodes that call the op of this name."""
    return [n for n in module.graph.nodes if n.op == "call_function" and op_name(n.target) == name]


def count(module: GraphModule, name: str) -> int:
    """How often the graph calls the op of this name."""
    return len(calls(module, name))


def warnings_of(caplog: Any) -> list[str]:
    """The warnings that passes logged."""
    records = [r for r in caplog.records if r.name == "piecework.passes" and r.levelname == "WARNING"]
    return [r.getMessage() for r in records]
