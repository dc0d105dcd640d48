"""Causal self-attention: packed projections, per-head norms, rotary, and the hole for attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import piecework.ops  # noqa: F401  registers the named ops
from piecework.layers.linear import Linear, PackedLinear
from piecework.layers.norm import RMSNorm

_rotary = torch.ops.piecework.rotary.default
_attention = torch.ops.piecework.attention.default

AttentionFn = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]
"""fn(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D], out [T, Hq, D]) writes `out`."""

_emitting: ContextVar[bool] = ContextVar("piecework_emit_attention", default=False)


@contextmanager
def emit_attention() -> Iterator[None]:
    """Let every attention layer that runs in this context emit the named op, whatever is bound to it.

    A trace runs in here. Other threads that use the same model don't notice.
    """
    token = _emitting.set(True)
    try:
        yield
    finally:
        _emitting.reset(token)


@dataclass(frozen=True)
class AttentionSpec:
    """What a KV cache and an attention kernel have to know about one layer.

    `window`: how many tokens a token sees, itself among them; 0 is all. `scale` multiplies q k^T.
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int


class Attention(nn.Module):
    """One layer's attention. `norm_eps` gives per-head norms of q and k; None: there are none."""

    def __init__(
        self,
        hidden: int,
        spec: AttentionSpec,
        *,
        qkv_bias: bool,
        o_bias: bool,
        norm_eps: float | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.fn: AttentionFn | None = None
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        sizes = (q_size, kv_size, kv_size)
        self.qkv_proj = PackedLinear(hidden, sizes, bias=qkv_bias, dtype=dtype, device=device)
        self.o_proj = Linear(q_size, hidden, bias=o_bias, dtype=dtype, device=device)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if norm_eps is not None:
            self.q_norm = RMSNorm(spec.head_dim, norm_eps, dtype=dtype, device=device)
            self.k_norm = RMSNorm(spec.head_dim, norm_eps, dtype=dtype, device=device)

    def forward(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
        """x [T, H], positions [T] int64, cos_sin [max_positions, R] float32 -> [T, H]."""
        q, k, v = self.qkv_proj(x).split(self.qkv_proj.sizes, -1)
        heads, kv_heads, head_dim = self.spec.num_heads, self.spec.num_kv_heads, self.spec.head_dim
        # -1 and not the row count: no symbolic size may cross the cut that attention makes.
        q = q.view(-1, heads, head_dim)
        k, v = k.view(-1, kv_heads, head_dim), v.view(-1, kv_heads, head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = _rotary(positions, q, k, cos_sin)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self._attend(q, k, v, out)
        y: Tensor = self.o_proj(out.view(-1, heads * head_dim))
        return y

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        spec = self.spec
        if self.fn is None or torch.compiler.is_compiling() or _emitting.get():
            _attention(q, k, v, out, spec.layer, spec.scale, spec.window)
        else:
            self.fn(spec.layer, q, k, v, out)
