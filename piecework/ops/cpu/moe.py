"""`moe` on the CPU: each expert runs on the rows that were routed to it, and on no others."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from piecework.ops.moe import moe, route


@moe.implement("cpu")
def moe_grouped(
    x: Tensor,
    router_logits: Tensor,
    w13: Tensor,
    w2: Tensor,
    top_k: int,
    renormalize: bool,
    num_valid_rows: Tensor | None = None,
) -> Tensor:
    """Run the rows grouped by expert; see the reference for the shapes."""
    weights, experts = route(router_logits, top_k, renormalize, num_valid_rows)
    flat = experts.flatten()
    if num_valid_rows is not None:
        flat = flat[: int(num_valid_rows) * top_k]
    order = flat.argsort(stable=True)
    rows = order // top_k
    share = weights.flatten()[order].to(x.dtype).unsqueeze(1)
    out = torch.zeros_like(x)
    start = 0
    for e, count in enumerate(flat.bincount(minlength=w13.shape[0]).tolist()):
        if count:
            mine = rows[start : start + count]
            gate, up = F.linear(x[mine], w13[e]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, w2[e])
            out.index_add_(0, mine, y * share[start : start + count])
            start += count
    return out
