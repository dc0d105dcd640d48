"""Fills those parameters of a model that are neither int8 nor in blocks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from piecework.layers.coded import coder, matrix_to_code
from piecework.layers.parameter import materialise
from piecework.weights.checkpoint import Checkpoint
from piecework.weights.load import Shapes, load_weights


def load_floats(
    model: nn.Module,
    checkpoint: Checkpoint,
    device: torch.device,
    taken: Mapping[str, Shapes] = {},
    *,
    repacked: bool,
) -> None:
    """Give the parameters of `model` that have none yet memory, and fill all; see `load_weights`.

    `repacked`: on the CPU, matrices in bfloat16 are coded as soon as they are read. They have no memory
    before: if all had some, what is freed could be gaps between others, and stay with the process.
    """
    if repacked:
        materialise(model, device, later=matrix_to_code)
        load_weights(model, checkpoint, taken, coder(model))
    else:
        materialise(model, device)
        load_weights(model, checkpoint, taken)
