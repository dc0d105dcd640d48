"""Folds the weights of norms into the linears behind them, before their inputs become int8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from piecework.weights.checkpoint import Checkpoint

# A norm, and the linears that read its result. A layer that has not all of them is left as it is: in a
# mixture of experts a router reads the norm too, and stays float.
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def fold_norms(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with its norms folded, or itself where it has none that can be."""
    folded = FoldedNorms(checkpoint)
    return folded if folded.folds else checkpoint


class FoldedNorms:
    """A float checkpoint whose linears lose less when their inputs are quantised to int8.

    One scale serves all channels of a token, and a norm's weight g makes some of them large in every token,
    which takes the steps of the others. W (g x) = (W diag|g|) (sign(g) x), but for float rounding: trained
    linears counter most of g, and what is quantised is the normalised x. It is SmoothQuant (Xiao et
    al., 2022) with scales that need no calibration.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.where = checkpoint.where
        self.config: dict[str, Any] = checkpoint.config
        self.generation_config: dict[str, Any] = checkpoint.generation_config
        self._checkpoint = checkpoint
        self.folds: dict[str, str] = {}
        """Weights of linears, and that of the norm which goes into each one's columns."""
        names = set(checkpoint.names())
        for norm, readers in READERS.items():
            for name in names:
                layer, found, _ = name.partition(f"{norm}.weight")
                linears = [f"{layer}{reader}.weight" for reader in readers]
                if found and names.issuperset(linears):
                    self.folds.update(dict.fromkeys(linears, name))
        self._folded = set(self.folds.values())

    def names(self) -> list[str]:
        """As in the checkpoint."""
        return self._checkpoint.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """As in the checkpoint."""
        return self._checkpoint.shape(name)

    def close(self) -> None:
        """Close the checkpoint."""
        self._checkpoint.close()

    def read(self, name: str, out: Tensor) -> None:
        """Copy one weight into `out`: of a norm that is folded its signs, of a linear what it becomes."""
        self._checkpoint.read(name, out)
        if name in self._folded:
            out.sign_()
        elif name in self.folds:
            norm = self.folds[name]
            weight = torch.empty(self.shape(norm), dtype=torch.float32, device=out.device)
            self._checkpoint.read(norm, weight)
            out.mul_(weight.abs_())
