"""Which inputs a run writes: such a run can't simply be repeated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor


def written_inputs(
    inputs: Mapping[int, Tensor], outputs: Mapping[int, Tensor], mutated: Sequence[int]
) -> list[int]:
    """Return the indices of the inputs that share memory with an output, or that the model says it writes."""
    return [
        index
        for index, tensor in inputs.items()
        if index in mutated or any(_overlap(tensor, output) for output in outputs.values())
    ]


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Compare the bytes from first to last element; interleaved views count as overlapping."""
    if a.device != b.device or not a.numel() or not b.numel():
        return False
    (a_start, a_end), (b_start, b_end) = _span(a), _span(b)
    return a_start < b_end and b_start < a_end


def _span(tensor: Tensor) -> tuple[int, int]:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()
