"""Linear, norm, embedding, MLP and MoE layers against torch's own, or a formula written out here."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piecework.layers.embedding import Embedding
from piecework.layers.linear import Linear, PackedLinear
from piecework.layers.mlp import MLP
from piecework.layers.moe import MoE
from piecework.layers.norm import RMSNorm

CPU = torch.device("cpu")
HERE = {"dtype": torch.float32, "device": CPU}


def fill(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("bias", [True, False])
def test_linear(bias: bool) -> None:
    layer = Linear(8, 5, bias=bias, **HERE)
    fill(layer)
    x = torch.randn(3, 8)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
    assert (layer.bias is not None) == bias
    assert repr(layer) == f"Linear(8, 5, bias={bias})"


def test_packed_linear_is_its_parts_side_by_side() -> None:
    layer = PackedLinear(8, (5, 3, 3), bias=True, **HERE)
    fill(layer)
    x = torch.randn(4, 8)
    parts = layer(x).split(layer.sizes, -1)
    row = 0
    for part, size in zip(parts, (5, 3, 3), strict=True):
        rows = slice(row, row + size)
        torch.testing.assert_close(part, F.linear(x, layer.weight[rows], layer.bias[rows]))
        row += size


def test_norm() -> None:
    layer = RMSNorm(6, 1e-3, **HERE)
    fill(layer)
    x = torch.randn(2, 3, 6)
    torch.testing.assert_close(layer(x), F.rms_norm(x, (6,), layer.weight, 1e-3))
    assert repr(layer) == "RMSNorm(6, eps=0.001)"


def test_embedding() -> None:
    layer = Embedding(7, 4, **HERE)
    fill(layer)
    assert torch.equal(layer(torch.tensor([6, 0, 6])), layer.weight[[6, 0, 6]])
    assert repr(layer) == "Embedding(7, 4)"


@pytest.mark.parametrize("bias", [True, False])
def test_mlp(bias: bool) -> None:
    layer = MLP(6, 10, bias=bias, **HERE)
    fill(layer)
    x = torch.randn(3, 6)
    gate, up = F.linear(x, layer.gate_up_proj.weight, layer.gate_up_proj.bias).chunk(2, -1)
    expected = F.linear(F.silu(gate) * up, layer.down_proj.weight, layer.down_proj.bias)
    torch.testing.assert_close(layer(x, None), expected, rtol=1e-4, atol=1e-4)


def by_hand(layer: MoE, row: Tensor) -> Tensor:
    """One row through its experts, one at a time."""
    probabilities = (layer.gate.weight @ row).softmax(-1)
    chosen = probabilities.argsort(descending=True)[: layer.top_k].tolist()
    total = sum(probabilities[e].item() for e in chosen) if layer.renormalize else 1.0
    out = torch.zeros_like(row)
    for e in chosen:
        gate, up = (layer.experts.w13[e] @ row).chunk(2)
        out += probabilities[e].item() / total * (layer.experts.w2[e] @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("renormalize", [True, False])
def test_moe(renormalize: bool) -> None:
    layer = MoE(6, 4, 5, 2, renormalize=renormalize, **HERE)
    fill(layer)
    x = torch.randn(9, 6)
    expected = torch.stack([by_hand(layer, row) for row in x])
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
    padded = layer(x, torch.tensor([7]))
    torch.testing.assert_close(padded[:7], expected[:7], rtol=1e-4, atol=1e-4)
    assert torch.equal(padded[7:], torch.zeros(2, 6))
    assert f"top_k=2, renormalize={renormalize}" in repr(layer)
