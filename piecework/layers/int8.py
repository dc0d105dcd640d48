"""Layers with int8 weights. Quantisation puts them in the place of a model's `Linear` and `Embedding`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import piecework.ops  # noqa: F401  registers the named ops
from piecework.ops.int8_panels import CHANNELS, lay_out, width_of

_quantize = torch.ops.piecework.quantize.default
_dynamic_quantize = torch.ops.piecework.dynamic_quantize.default
_linear_w8a8 = torch.ops.piecework.linear_w8a8.default
_linear_w8 = torch.ops.piecework.linear_w8.default
_embedding_int8 = torch.ops.piecework.embedding_int8.default


@dataclass(frozen=True)
class StaticInput:
    """How a linear's input is quantised: q = clamp(round(x / scale + offset), -128, 127)."""

    scale: float
    offset: int = 0


def _frozen(tensor: Tensor | None) -> nn.Parameter | None:
    return None if tensor is None else nn.Parameter(tensor, requires_grad=False)


class Int8Linear(nn.Module):
    """What both kinds have: weight int8 [N, K], its scale [N] float32, and a bias [N] or none.

    `sizes` are the outputs of each part of a packed projection, `dtype` is that of the result.
    """

    weight: nn.Parameter
    scale: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor,
        *,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        sizes: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = _frozen(bias)
        self.dtype = dtype
        self.sizes = sizes or (weight.shape[0],)

    def lay_out(self) -> None:
        """Lay the weight out in panels, as the CPU's kernels read it."""
        self.weight = nn.Parameter(lay_out(self.weight), requires_grad=False)

    def extra_repr(self) -> str:
        """Show the sizes in the model's repr."""
        return f"{width_of(self.weight)}, {self.scale.shape[0]}, bias={self.bias is not None}"


class W8Linear(Int8Linear):
    """Weight-only int8: y = x (weight * scale)^T + bias, with x as it comes."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N] in x's dtype."""
        y: Tensor = _linear_w8(x, self.weight, self.scale, self.bias)
        return y


class W8A8Linear(Int8Linear):
    """int8 times int8: y = (x8 weight^T + quant_bias) * scale * x_scale + bias.

    With `static` the input has one known scale, which `scale` [N] includes; without, each row has its own.
    `quant_bias` [N] int32 is added to the integer product: minus the input's offset times the sums of the
    weight's rows, and a bias that a checkpoint may have folded into it.
    """

    quant_bias: nn.Parameter | None
    input_scale: nn.Parameter | None
    input_reciprocal: nn.Parameter | None
    input_offset: nn.Parameter | None

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor,
        *,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        sizes: tuple[int, ...] = (),
        static: StaticInput | None = None,
        quant_bias: Tensor | None = None,
    ) -> None:
        super().__init__(weight, scale, dtype=dtype, bias=bias, sizes=sizes)
        self.quant_bias = _frozen(quant_bias)
        self.input_scale = self.input_reciprocal = self.input_offset = None
        if static is not None:
            step = torch.tensor([static.scale], dtype=torch.float32)
            self.input_scale = _frozen(step.to(weight.device))
            self.input_reciprocal = _frozen(step.reciprocal().to(weight.device))
            if static.offset:
                offset = torch.tensor([float(static.offset)])
                self.input_offset = _frozen(offset.to(weight.device))

    @property
    def is_static(self) -> bool:
        """Whether the input's scale is known before a run."""
        return self.input_scale is not None

    def forward(self, x: Tensor, x_scale: Tensor | None = None) -> Tensor:
        """x [..., K] -> [..., N] in `dtype`.

        An x that is int8 already isn't quantised again: a static layer takes it as it is, a dynamic one
        with its scale x_scale [..., 1] float32.
        """
        if x.dtype != torch.int8:
            if self.is_static:
                x = _quantize(x, self.input_scale, self.input_reciprocal, self.input_offset)
            else:
                x, x_scale = _dynamic_quantize(x)
        elif (x_scale is None) != self.is_static:
            raise ValueError("an int8 input of a dynamic layer comes with its scale, of a static one without")
        y: Tensor = _linear_w8a8(x, self.weight, self.scale, x_scale, self.quant_bias, self.bias, self.dtype)
        return y

    def extra_repr(self) -> str:
        """Show sizes and scheme in the model's repr."""
        return f"{super().extra_repr()}, {'static' if self.is_static else 'dynamic'}"


class Int8Embedding(nn.Module):
    """A table that is the head too: weight int8 [V, H], scale [V] float32, rows and logits in `dtype`.

    `weight_only`: the head takes its input as it comes, else as int8 with a scale for each row.
    """

    def __init__(self, weight: Tensor, scale: Tensor, *, dtype: torch.dtype, weight_only: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.dtype = dtype
        self.weight_only = weight_only

    def forward(self, ids: Tensor) -> Tensor:
        """ids [T] int64 -> [T, H]."""
        rows: Tensor = _embedding_int8(ids, self.weight, self.scale, self.dtype)
        return rows

    def project(self, x: Tensor) -> Tensor:
        """x [T, H] -> the product with each row, [T, V]."""
        y: Tensor
        if self.weight_only:
            y = _linear_w8(x, self.weight, self.scale, None)
        else:
            x8, x_scale = _dynamic_quantize(x)
            y = _linear_w8a8(x8, self.weight, self.scale, x_scale, None, None, self.dtype)
        return y

    def lay_out(self) -> None:
        """Lay the weight out as that of a linear; but rows of other than whole blocks stay as they are."""
        if self.weight.shape[1] % CHANNELS == 0:
            self.weight = nn.Parameter(lay_out(self.weight), requires_grad=False)

    def extra_repr(self) -> str:
        """Show the sizes in the model's repr."""
        return f"{self.scale.shape[0]}, {width_of(self.weight)}"
