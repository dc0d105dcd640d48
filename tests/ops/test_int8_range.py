"""Values beyond int8 become its ends, in the references that every other implementation is held to."""

from __future__ import annotations

import torch

from piecework.ops.quantize import dynamic_quantize, quantize

X = torch.tensor([[-1e6, -130.0, -3.0, 0.4, 3.0, 130.0, 1e6]])


def test_what_lies_outside_of_int8_becomes_its_end() -> None:
    one = torch.ones(1)
    assert quantize.reference(X, one, one).tolist() == [[-128, -128, -3, 0, 3, 127, 127]]
    shifted = quantize.reference(X, one, one, torch.tensor([100.0]))
    assert shifted.tolist() == [[-128, -30, 97, 100, 103, 127, 127]]
    quantised, scale = dynamic_quantize.reference(X)
    assert quantised[0, [0, -1]].tolist() == [-127, 127]
    assert abs(scale.item() * 127 - 1e6) < 1
