"""The functions of torch_npu as operations of torch, made of `fake_torch_npu`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import fake_torch_npu
import torch
from torch import Tensor

from torch_npu._machine import DEVICE, machine

_FREE_SIZES = {"npu_fused_infer_attention_score": lambda query, *_, **__: (query.clone(), query.new_empty(1))}
_library = torch.library.Library("npu", "FRAGMENT")
REGISTERED = tuple(name for name in vars(fake_torch_npu) if name.startswith("npu_"))


def _register(name: str) -> None:
    function: Callable[..., Any] = getattr(fake_torch_npu, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        machine().called.add(name)
        return function(*args, **kwargs)

    schema = torch.library.infer_schema(function, mutates_args=())
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CPU")
    torch.library.register_fake(f"npu::{name}", _FREE_SIZES.get(name, function), lib=_library)


for _name in REGISTERED:
    _register(_name)


def empty_with_format(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    acl_format: int = 2,
) -> Tensor:
    """Allocate in the simulated memory; the contents are NaN."""
    assert device == DEVICE and dtype is not None and acl_format == 2
    if machine().recorder is not None:
        raise RuntimeError("a buffer is allocated in the middle of a capture")
    return machine().memory.empty(tuple(size), None, dtype)
