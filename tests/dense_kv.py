"""Attention over a plain growing list of keys and values: the simplest cache, as an oracle for tests.

    model.bind_attention(DenseKV(model.attention_specs))

One sequence only. It is written on torch's own attention, so it shares no code with the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class DenseKV:
    """Keeps all keys and values of one sequence, per layer, and attends over them."""

    def __init__(self, specs: Sequence[Any]) -> None:
        self.specs = specs
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        if layer in self.keys:
            k = torch.cat((self.keys[layer], k))
            v = torch.cat((self.values[layer], v))
        self.keys[layer], self.values[layer] = k.clone(), v.clone()
        spec, total, new = self.specs[layer], k.shape[0], q.shape[0]
        age = torch.arange(total - new, total)[:, None] - torch.arange(total)[None]
        mask = (age >= 0) & (age < spec.window) if spec.window else age >= 0
        heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
        result = F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=spec.scale, enable_gqa=True)
        out.copy_(result[0].transpose(0, 1))
