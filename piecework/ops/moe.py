"""`moe`: a layer of routed experts, as one op whose output shape does not depend on the routing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from piecework.ops.registry import define


def route(
    router_logits: Tensor, top_k: int, renormalize: bool, num_valid_rows: Tensor | None
) -> tuple[Tensor, Tensor]:
    """router_logits [T, E] -> (weights [T, K] float32, experts [T, K] int64).

    Softmax over all experts, then the K best; `renormalize` makes their weights sum to one. Rows from
    `num_valid_rows` on are padding and get weight zero.
    """
    weights, experts = F.softmax(router_logits, -1, dtype=torch.float32).topk(top_k, -1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    if num_valid_rows is not None:
        rows = torch.arange(weights.shape[0], device=weights.device)
        weights = weights * (rows < num_valid_rows).unsqueeze(-1)
    return weights, experts


def _moe(
    x: Tensor,
    router_logits: Tensor,
    w13: Tensor,
    w2: Tensor,
    top_k: int,
    renormalize: bool,
    num_valid_rows: Tensor | None = None,
) -> Tensor:
    """Sum over each row's experts of weight * SwiGLU expert(row).

    x [T, H], router_logits [T, E], w13 [E, 2I, H] (gate rows, then up rows), w2 [E, H, I],
    num_valid_rows [1] integer or None -> [T, H]. The reference runs every expert on every row.
    """
    weights, experts = route(router_logits, top_k, renormalize, num_valid_rows)
    out = torch.zeros_like(x)
    for e in range(w13.shape[0]):
        share = (weights * (experts == e)).sum(-1, keepdim=True)
        gate, up = F.linear(x, w13[e]).chunk(2, -1)
        out = out + F.linear(F.silu(gate) * up, w2[e]) * share.to(x.dtype)
    return out


def moe_fake(
    x: Tensor,
    router_logits: Tensor,
    w13: Tensor,
    w2: Tensor,
    top_k: int,
    renormalize: bool,
    num_valid_rows: Tensor | None = None,
) -> Tensor:
    return x.new_empty(x.shape)


moe = define(
    "moe(Tensor x, Tensor router_logits, Tensor w13, Tensor w2, int top_k, bool renormalize, "
    "Tensor? num_valid_rows=None) -> Tensor",
    _moe,
    moe_fake,
)
