"""Parameters that are allocated and nothing else: a checkpoint fills them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn

_deferred: ContextVar[bool] = ContextVar("piecework_deferred_parameters", default=False)


@contextmanager
def deferred_parameters() -> Iterator[None]:
    """Give parameters that are made in this context a shape and a dtype, and no memory yet.

    Quantisation replaces most of them, so that they never need any; `materialise` allocates the rest.
    """
    token = _deferred.set(True)
    try:
        yield
    finally:
        _deferred.reset(token)


def parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Return an uninitialised parameter without gradient."""
    where = torch.device("meta") if _deferred.get() else device
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=where), requires_grad=False)


def materialise(
    model: nn.Module,
    device: torch.device,
    later: Callable[[nn.Module], nn.Parameter | None] = lambda module: None,
) -> None:
    """Allocate, on `device`, every parameter of `model` that has no memory yet.

    `later` says of a module which of its parameters gets some when it is read.
    """
    for module in model.modules():
        kept = later(module)
        for name, given in module.named_parameters(recurse=False):
            if given.is_meta and given is not kept:
                # Not empty_like, which asks meta's implementations in Python: seconds, and 20 MB of sympy.
                made = nn.Parameter(
                    torch.empty(given.shape, dtype=given.dtype, device=device), requires_grad=False
                )
                setattr(module, name, made)
