"""The attention layer: what it hands to the hole, and which hole it uses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from piecework.layers.attention import Attention, AttentionSpec
from piecework.layers.rotary import rotary_table
from piecework.models.config import RopeConfig

SPEC = AttentionSpec(layer=3, num_heads=4, num_kv_heads=2, head_dim=8, scale=0.25, window=0)
HIDDEN, TOKENS = 24, 6


def layer(norm_eps: float | None = None, spec: AttentionSpec = SPEC) -> Attention:
    made = Attention(
        HIDDEN,
        spec,
        qkv_bias=True,
        o_bias=False,
        norm_eps=norm_eps,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    return x, torch.arange(TOKENS), rotary_table(RopeConfig(), SPEC.head_dim, 16)


def turn(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding as a product of complex numbers."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** -(torch.arange(half) / half)
    angles = positions[:, None, None] * frequencies
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), -1)


@pytest.mark.parametrize("norm_eps", [None, 1e-5])
def test_bound_callable_gets_what_the_formula_says(norm_eps: float | None) -> None:
    attention = layer(norm_eps)
    x, positions, table = inputs()
    calls: list[int] = []

    def fn(index: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        calls.append(index)
        rows = F.linear(x, attention.qkv_proj.weight, attention.qkv_proj.bias)
        wide = (rows[:, :32].view(TOKENS, 4, 8), rows[:, 32:48].view(TOKENS, 2, 8))
        if attention.q_norm is not None and attention.k_norm is not None:
            weights = (attention.q_norm.weight, attention.k_norm.weight)
            wide = tuple(F.rms_norm(t, (8,), w, 1e-5) for t, w in zip(wide, weights, strict=True))
        torch.testing.assert_close(q, turn(wide[0], positions), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(k, turn(wide[1], positions), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(v, rows[:, 48:].view(TOKENS, 2, 8))
        assert out.shape == q.shape and out.is_contiguous() and out.dtype == q.dtype
        out.copy_(q)

    attention.fn = fn
    y = attention(x, positions, table)
    assert calls == [3]
    assert y.shape == (TOKENS, HIDDEN)
    assert (attention.q_norm is not None) == (norm_eps is not None)


@pytest.mark.parametrize("window", [0, 2])
def test_unbound_layer_is_causal_attention_over_its_tokens(window: int) -> None:
    attention = layer(spec=AttentionSpec(**{**SPEC.__dict__, "window": window}))
    x, positions, table = inputs()
    whole = attention(x, positions, table)
    seen: list[tuple[Tensor, ...]] = []
    attention.fn = lambda index, q, k, v, out: seen.append((q, k, v))
    attention(x, positions, table)
    q, k, v = (t.transpose(0, 1) for t in seen[0])
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    if window:
        mask &= torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1 - window)
    mixed = F.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, scale=SPEC.scale, enable_gqa=True
    )
    expected = attention.o_proj(mixed[0].transpose(0, 1).reshape(TOKENS, -1))
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)


def test_trace_emits_the_op_even_when_bound() -> None:
    attention = layer()
    attention.fn = lambda *_: pytest.fail("the bound callable ran under export")
    program = torch.export.export(attention, inputs(), strict=False)
    holes = [n for n in program.graph.nodes if n.target is torch.ops.piecework.attention.default]
    assert [hole.args[4:] for hole in holes] == [(3, 0.25, 0)]
