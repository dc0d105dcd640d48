"""Coded weights are the bfloat16 that they were made of, bit for bit; so are their products and rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from piecework import ops
from piecework.layers.coded import CodedLinear, code_layer
from piecework.layers.linear import Linear
from piecework.native import library, reads_panels
from piecework.ops.coded_linear import coded_size, decode
from piecework.ops.cpu.coded_linear import code

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
LINEAR = ops.get("linear_coded")
linear_coded, embedding_coded = torch.ops.piecework.linear_coded, torch.ops.piecework.embedding_coded


def any_bits(rows: int, inputs: int) -> Tensor:
    """Weights of all exponents, NaN, infinities, zeros and denormals among them."""
    return torch.randint(-(2**15), 2**15, (rows, inputs), dtype=torch.int16).view(torch.bfloat16)


def with_spilled_blocks(rows: int, inputs: int) -> Tensor:
    """Usual weights, but in the first and in the last block that are whole."""
    weight = torch.randn(rows, inputs).bfloat16()
    for r, k in {(0, 0), ((rows - 16) // 16 * 16, (inputs - 32) // 32 * 32)}:
        weight[r : r + 16, k : k + 32] = any_bits(16, 32)
    return weight


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16)


def coded(weight: Tensor) -> Tensor:
    made = code(weight)
    assert made is not None and made.numel() == coded_size(*weight.shape)
    return made


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70), st.integers(1, 130))
def test_decoded_weights_are_those_that_were_coded(rows: int, inputs: int) -> None:
    wide = torch.randn(rows, inputs + 5).bfloat16()
    wide[0, 3], wide[-1, 3] = 0.0, -0.0
    for weight in (wide[:, 3 : 3 + inputs], wide[:, :inputs].contiguous()):
        assert torch.equal(bits(decode(coded(weight), rows, inputs)), bits(weight))


@pytest.mark.parametrize(("rows", "inputs"), [(16, 32), (48, 576), (530, 70), (33, 2500)])
def test_blocks_with_many_exponents_are_spilled(rows: int, inputs: int) -> None:
    weight = with_spilled_blocks(rows, inputs)
    made = coded(weight)
    assert torch.equal(bits(decode(made, rows, inputs)), bits(weight))
    ids = torch.randint(rows, (9,))
    assert torch.equal(bits(embedding_coded(ids, made, rows, inputs)), bits(weight[ids]))
    finite = torch.where(weight.isfinite() & (weight.abs() < 1e4), weight, 1.0)
    x = torch.randn(3, inputs).bfloat16()
    assert torch.equal(linear_coded(x, coded(finite), rows), plain_product(x, finite))


def test_a_matrix_with_too_many_spilled_blocks_is_not_coded() -> None:
    assert code(any_bits(130, 100)) is None


@pytest.mark.parametrize(("outputs", "inputs", "smaller"), [(64, 64, True), (6, 64, False), (64, 20, False)])
def test_a_matrix_that_would_grow_is_not_coded(outputs: int, inputs: int, smaller: bool) -> None:
    layer = Linear(inputs, outputs, bias=False, dtype=torch.bfloat16, device=torch.device("cpu"))
    model = torch.nn.Sequential(layer)
    layer.weight.normal_()
    code_layer(model, "0")
    assert isinstance(model[0], CodedLinear) == smaller
    assert model[0].weight.nbytes <= layer.weight.nbytes


def test_sixteen_bits_take_twelve() -> None:
    weight = torch.randn(4096, 576).bfloat16()
    assert coded(weight).nbytes < 0.78 * weight.nbytes


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 70), st.integers(1, 70), st.integers(1, 130), st.booleans())
def test_products_are_those_of_the_weights(rows: int, outputs: int, inputs: int, biased: bool) -> None:
    check(rows, outputs, inputs, biased)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 11, 16, 31, 47, 64, 65, 101, 290])
def test_channels_in_several_passes(rows: int) -> None:
    check(rows, 85, 2500, biased=True)


def check(rows: int, outputs: int, inputs: int, biased: bool) -> None:
    weight = torch.randn(outputs, inputs).bfloat16()
    bias = torch.randn(outputs).bfloat16() if biased else None
    wide = torch.randn(rows, inputs + 3).bfloat16()
    made = coded(weight)
    for x in (wide[:, 3:], wide[:, :inputs].contiguous().view(1, rows, inputs)):
        runs = LINEAR.resolve(("cpu", "reference"), x, made, outputs, bias).name
        assert runs == ("cpu" if reads_panels() else "reference")
        assert torch.equal(linear_coded(x, made, outputs, bias), plain_product(x, weight, bias))


def plain_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """By the kernel for weights in rows, where there is one for coded ones, too, else by torch."""
    linear = ops.get("linear")
    run = linear.implementations["cpu"].run if reads_panels() else linear.reference
    y: Tensor = run(x, weight, bias)
    return y


def test_an_id_out_of_range_gives_nan_and_nothing_of_the_memory() -> None:
    made = coded(torch.ones(24, 5).bfloat16())
    rows = embedding_coded(torch.tensor([2**62, 1, -1, 24]), made, 24, 5)
    assert rows.isnan().all(1).tolist() == [True, False, True, True]


def test_other_types_are_left_to_the_reference() -> None:
    made = coded(torch.ones(4, 3).bfloat16())
    assert LINEAR.resolve(("cpu", "reference"), torch.ones(2, 3), made, 4).name == "reference"


def test_bytes_that_nobody_coded_are_weights_too() -> None:
    """Graphs are verified with made-up inputs."""
    for _ in range(20):
        made = torch.randint(0, 2, (coded_size(20, 70),), dtype=torch.uint8)
        assert linear_coded(torch.ones(3, 70).bfloat16(), made, 20).shape == (3, 20)
        assert torch.equal(bits(embedding_coded(torch.arange(20), made, 20, 70)), bits(decode(made, 20, 70)))
