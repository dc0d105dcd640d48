"""`moe` on NPUs: a grouped product over rows that are sorted by expert, in shapes that don't depend on it."""

from __future__ import annotations

import torch
from torch import Tensor

from piecework.ops.moe import moe as moe_op
from piecework.ops.moe import route
from piecework.ops.npu.quantize import HALVES
from piecework.ops.npu.vendor import available, call

_MOST_EXPERTS = 1024  # of a grouped product
_ONE_TENSOR, _BY_ROWS, _ENDS = 3, 0, 0


def _supports(
    x: Tensor,
    router_logits: Tensor,
    w13: Tensor,
    w2: Tensor,
    top_k: int,
    renormalize: bool,
    num_valid_rows: Tensor | None = None,
) -> bool:
    return (
        available()
        and x.dtype in (*HALVES, torch.float32)
        and w13.dtype == w2.dtype == x.dtype
        and w13.shape[0] <= _MOST_EXPERTS
    )


@moe_op.implement("npu", supports=_supports)
def moe(
    x: Tensor,
    router_logits: Tensor,
    w13: Tensor,
    w2: Tensor,
    top_k: int,
    renormalize: bool,
    num_valid_rows: Tensor | None = None,
) -> Tensor:
    """See the reference. Padded rows stand behind the last group, where nothing is computed."""
    count, experts = w13.shape[0], torch.arange(w13.shape[0], device=x.device)
    weights, chosen = route(router_logits, top_k, renormalize, num_valid_rows)
    if num_valid_rows is not None:
        rows = torch.arange(x.shape[0], device=x.device)
        chosen = torch.where((rows < num_valid_rows).unsqueeze(1), chosen, count)
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    ends = (flat.unsqueeze(1) <= experts).sum(0)  # [E]: where each expert's rows end
    hidden = _grouped(x[order // top_k], w13, ends)
    (active,) = call("npu_swiglu", self=hidden, dim=-1)
    y = _grouped(active, w2, ends)[order.argsort()].view(x.shape[0], top_k, -1)
    live = (chosen < count).unsqueeze(-1)
    return torch.where(live, y * weights.unsqueeze(-1).to(x.dtype), 0).sum(1)


def _grouped(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows [R, K] by the weight [E, N, K] of the group that each is in -> [R, N]."""
    (y,) = call(
        "npu_grouped_matmul",
        x=[rows],
        weight=[weight.transpose(1, 2)],
        group_list=ends,
        split_item=_ONE_TENSOR,
        group_type=_BY_ROWS,
        group_list_type=_ENDS,
    )
    return y
