"""Layers whose bfloat16 weights are coded in 12 bits; `code_layer` puts them in the place of others."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn

from piecework.allocator import give_back_freed
from piecework.layers.embedding import Embedding
from piecework.layers.int8 import Int8Embedding, Int8Linear
from piecework.layers.linear import Linear
from piecework.ops.coded_linear import coded_size
from piecework.ops.cpu.coded_linear import code

log = logging.getLogger("piecework.load")

_linear_coded = torch.ops.piecework.linear_coded.default
_embedding_coded = torch.ops.piecework.embedding_coded.default


class CodedLinear(nn.Module):
    """y = x W^T + b, with W [outputs, inputs] as `code` makes it and b [outputs] or none.

    `sizes` are the outputs of each part of a packed projection.
    """

    def __init__(
        self,
        coded: Tensor,
        outputs: int,
        inputs: int,
        *,
        bias: nn.Parameter | None = None,
        sizes: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(coded, requires_grad=False)
        self.bias = bias
        self.outputs = outputs
        self.inputs = inputs
        self.sizes = sizes or (outputs,)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] bfloat16 -> [..., outputs]."""
        y: Tensor = _linear_coded(x, self.weight, self.outputs, self.bias)
        return y

    def extra_repr(self) -> str:
        """Show the sizes in the model's repr."""
        return f"{self.inputs}, {self.outputs}, bias={self.bias is not None}"


class CodedEmbedding(nn.Module):
    """A table [vocab_size, size] as `code` makes it."""

    def __init__(self, coded: Tensor, vocab_size: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(coded, requires_grad=False)
        self.vocab_size = vocab_size
        self.size = size

    def forward(self, ids: Tensor) -> Tensor:
        """ids [T] int64 -> bfloat16 [T, size]."""
        rows: Tensor = _embedding_coded(ids, self.weight, self.vocab_size, self.size)
        return rows

    def project(self, x: Tensor) -> Tensor:
        """x [T, size] -> the product with each row, [T, vocab_size]."""
        y: Tensor = _linear_coded(x, self.weight, self.vocab_size, None)
        return y

    def extra_repr(self) -> str:
        """Show the sizes in the model's repr."""
        return f"{self.vocab_size}, {self.size}"


def matrix_to_code(module: nn.Module) -> nn.Parameter | None:
    """Return the bfloat16 matrix of a layer for which there is a coded one, and a smaller one.

    Blocks are whole: a matrix of a few rows, or of a few channels, would grow.
    """
    if not isinstance(module, Linear | Embedding) or module.weight.dtype != torch.bfloat16:
        return None
    weight = module.weight
    return weight if coded_size(*weight.shape) < weight.nbytes else None


def is_laid_out(module: nn.Module) -> bool:
    """Whether the weight of a layer lies as the CPU's kernels read it best: coded, or int8 in panels."""
    in_panels = isinstance(module, Int8Linear | Int8Embedding) and module.weight.dim() == 3
    return in_panels or isinstance(module, CodedLinear | CodedEmbedding)


def code_layer(model: nn.Module, name: str, code: Callable[[Tensor], Tensor | None] = code) -> None:
    """Put a coded layer in the place of the layer `name`, on the CPU, where there is one for it.

    A matrix for which `code` gives None, as it has too many different exponents, stays as it is.
    """
    module = model.get_submodule(name)
    weight = matrix_to_code(module)
    if weight is None:
        return
    coded = code(weight)
    if coded is None:
        log.info("%s stays in 16 bits: too many of its blocks have more than 16 different upper bytes", name)
        return
    made: nn.Module = CodedEmbedding(coded, *weight.shape)
    if isinstance(module, Linear):
        made = CodedLinear(coded, *weight.shape, bias=module.bias, sizes=getattr(module, "sizes", ()))
    model.set_submodule(name, made.eval())


def coder(model: nn.Module) -> Callable[[str], None]:
    """Return what codes a layer of `model` when it is told that a parameter, its matrix, has its values."""

    def code(parameter: str) -> None:
        layer, _, name = parameter.rpartition(".")
        if name == "weight":
            code_layer(model, layer)
            give_back_freed()  # the allocator would keep what lies between coded matrices

    return code
