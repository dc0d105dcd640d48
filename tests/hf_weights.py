"""Copy the weights of a `transformers` model into ours, without the package's own loader."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def copy_weights(model: Any, state: dict[str, Tensor]) -> None:
    """Fill every parameter of `model` from the state of a `transformers` model; none may be left over."""
    left = dict(state)
    if model.lm_head is None:
        left.pop("lm_head.weight", None)
    for name, parameter in model.named_parameters():
        sources = [name]
        for packed, parts in model.packed_modules.items():
            if f".{packed}." in name and name not in left:
                sources = [name.replace(f".{packed}.", f".{part}.") for part in parts]
        sources = [s.replace("experts.w13", "experts.gate_up_proj") for s in sources]
        sources = [s.replace("experts.w2", "experts.down_proj") for s in sources]
        value = torch.cat([left.pop(s) for s in sources])
        assert value.shape == parameter.shape, name
        parameter.copy_(value)
    assert not left, sorted(left)
