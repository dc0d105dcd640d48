"""`all_reduce`: the sum over all ranks of a tensor-parallel group, each of which holds a part."""

from __future__ import annotations

import torch
from torch import Tensor

from piecework.errors import PieceworkError
from piecework.ops.registry import define


def _all_reduce(x: Tensor) -> Tensor:
    """Sum x over the ranks; all of them get the same numbers, in x's shape.

    The group is torch.distributed's default one: a process is a rank of one group. Every rank has to call
    it as often, with the same shapes, in the same order.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        raise PieceworkError("piecework::all_reduce was called in a process that is no rank of a group")
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


def _all_reduce_fake(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


all_reduce = define("all_reduce(Tensor x) -> Tensor", _all_reduce, _all_reduce_fake)
