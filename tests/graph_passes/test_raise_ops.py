"""What other models write in torch becomes named ops; what only looks like it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pass_graphs import calls, count, function_graph
from torch import Tensor
from torch.fx import GraphModule

from piecework.graph.passes import make_manager

H = 16
X, W = ("T", H), (H,)


def raised(fn: Callable[..., Any], *shapes: Any, dtype: torch.dtype = torch.float32) -> GraphModule:
    module = function_graph(fn, *shapes, dtype=dtype)
    report = make_manager(foreign=True, verify=True).apply(module)
    assert {p.status for p in report.passes} <= {"applied", "no match"}
    return module


def transformers_norm(x: Tensor, weight: Tensor) -> Tensor:
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * h.to(x.dtype)


def llama_norm(x: Tensor, weight: Tensor) -> Tensor:
    h = x.float()
    return (h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-6)).type_as(x) * weight


def norm_by_root(x: Tensor, weight: Tensor) -> Tensor:
    h = x.float()
    return weight * (h / torch.sqrt(h.square().mean(dim=-1, keepdim=True) + 1e-6)).to(x.dtype)


def torch_norm(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, (H,), weight, 1e-6)


NORMS = [transformers_norm, llama_norm, norm_by_root, torch_norm]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", NORMS, ids=lambda f: f.__name__)
def test_norms_in_every_spelling_are_raised(norm: Callable[..., Tensor], dtype: torch.dtype) -> None:
    module = raised(norm, X, W, dtype=dtype)
    assert [str(n.target) for n in module.graph.nodes if n.op == "call_function"] == [
        "piecework.rms_norm.default"
    ]
    x, weight = torch.randn(5, H).to(dtype), torch.randn(H).to(dtype)
    torch.testing.assert_close(module(x, weight), norm(x, weight))


def gemma_norm(x: Tensor, weight: Tensor) -> Tensor:
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + weight.float())).to(x.dtype)


def norm_over_rows(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6))


def cubic_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-6))


def norm_of_another(x: Tensor, weight: Tensor) -> Tensor:
    return weight * ((x + 1) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def standard_deviation(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize(
    "norm", [norm_over_rows, cubic_norm, norm_of_another, standard_deviation], ids=lambda f: f.__name__
)
def test_what_only_looks_like_a_norm_is_left_alone(norm: Callable[..., Tensor]) -> None:
    assert count(raised(norm, X, W), "piecework::rms_norm") == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_computed_is_a_weight(dtype: torch.dtype) -> None:
    # In 16 bits this one rounds after the weight: the named op gets float32, and the cast stays behind it.
    module = raised(gemma_norm, X, W, dtype=dtype)
    (norm,) = calls(module, "piecework::rms_norm")
    assert norm.meta["val"].dtype is torch.float32
    x, weight = torch.randn(5, H).to(dtype), torch.randn(H).to(dtype)
    torch.testing.assert_close(module(x, weight), gemma_norm(x, weight))


def test_a_norm_in_16_bits_throughout_is_left_alone() -> None:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    assert count(raised(norm, X, W, dtype=torch.bfloat16), "piecework::rms_norm") == 0
    assert count(raised(norm, X, W), "piecework::rms_norm") == 1


def test_a_weight_of_another_dtype_is_left_alone() -> None:
    weight = torch.empty(H, dtype=torch.float32)
    module = raised(transformers_norm, X, weight, dtype=torch.bfloat16)
    assert count(module, "piecework::rms_norm") == 0


def test_gated_layers_are_raised() -> None:
    def apart(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        silu = torch.nn.functional.silu
        return silu(torch.nn.functional.linear(x, gate)) * torch.nn.functional.linear(x, up)

    module = raised(apart, X, (8, H), (8, H))
    assert (count(module, "piecework::silu_and_mul"), count(module, "aten::cat")) == (1, 1)
    assert count(module, "piecework::linear") == 2

    def halves(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return up * torch.nn.functional.silu(gate)

    module = raised(halves, X)
    assert [n.name for n in module.graph.nodes if n.op == "call_function"] == ["silu_and_mul"]


def test_other_gates_are_left_alone() -> None:
    functional = torch.nn.functional
    others = [
        lambda x: functional.gelu(x[:, :8]) * x[:, 8:],
        lambda x: functional.silu(x[:, :8]) + x[:, 8:],
        lambda x: functional.silu(x[:, :8]) * x[:, 15:],
        lambda x: functional.silu(x) * 2.0,
    ]
    for fn in others:
        assert count(raised(fn, X), "piecework::silu_and_mul") == 0
    swapped = raised(lambda x: functional.silu(x[:, 8:]) * x[:, :8], X)
    assert (count(swapped, "piecework::silu_and_mul"), count(swapped, "aten::cat")) == (1, 1)


def test_linear_layers_are_raised_with_and_without_bias() -> None:
    linear = torch.nn.functional.linear
    with_bias = (lambda x, w, b: linear(x, w, b), [(8, H), (8,)])
    for fn, shapes in ((lambda x, w: linear(x, w), [(8, H)]), with_bias):
        module = raised(fn, X, *shapes)
        inputs = [torch.randn(3, H), *(torch.randn(s) for s in shapes)]
        assert count(module, "piecework::linear") == 1
        torch.testing.assert_close(module(*inputs), fn(*inputs))


D = 8


def rotate_half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., D // 2 :], x[..., : D // 2]), dim=-1)


def angles(frequencies: Tensor, tokens: int, batch: int = 1) -> Tensor:
    positions = torch.arange(tokens)[None].expand(batch, -1)
    f = positions[..., None].float() * frequencies
    return torch.cat((f, f), dim=-1)


def transformers_rotary(q: Tensor, k: Tensor, frequencies: Tensor, heads: int, scale: float = 1.0) -> Any:
    """q, k with the heads as dimension `heads` of four."""
    f = angles(frequencies, q.shape[3 - heads])
    cos, sin = (f.cos() * scale).to(q.dtype).unsqueeze(heads), (f.sin() * scale).to(q.dtype).unsqueeze(heads)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("heads", [1, 2])
def test_rotary_is_raised(heads: int, batch: int, dtype: torch.dtype) -> None:
    def fn(q: Tensor, k: Tensor, frequencies: Tensor) -> Any:
        return transformers_rotary(q, k, frequencies, heads, 0.7)

    shapes = [(batch, n, "T", D) if heads == 1 else (batch, "T", n, D) for n in (4, 2)]
    frequencies = torch.empty(D // 2)
    module = raised(fn, *shapes, frequencies, dtype=dtype)
    assert (count(module, "piecework::rotary"), count(module, "aten::neg")) == (1, 0)
    for tokens in (1, 6):
        sizes = [[tokens if n == "T" else n for n in shape] for shape in shapes]
        q, k = (torch.randn(s).to(dtype) for s in sizes)
        f = torch.rand(D // 2)
        tolerance = {"rtol": 0, "atol": 0.05} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(module(q, k, f), fn(q, k, f), **tolerance)


def refused_rotary(fn: Callable[..., Any], *shapes: Any) -> list[str]:
    module = function_graph(fn, *shapes)
    entry = make_manager(["raise_rotary"], verify=True).apply(module)["raise_rotary"]
    assert count(module, "piecework::rotary") == 0
    return list(entry.refused)


Q = (1, 4, 6, D)


def test_rotary_is_left_alone_where_the_angles_may_differ() -> None:
    def from_outside(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin

    unknown = ["it can't be shown that cos and sin hold each angle twice"]
    assert refused_rotary(from_outside, Q, Q, (1, 6, D), (1, 6, D)) == unknown

    def two_kinds(q: Tensor, k: Tensor, a: Tensor, b: Tensor) -> Any:
        f = torch.cat((a, b), -1)
        return from_outside(q, k, f.cos(), f.sin())

    assert refused_rotary(two_kinds, Q, Q, (1, 6, D // 2), (1, 6, D // 2)) == unknown


def test_rotary_is_left_alone_without_a_key_or_with_sine_for_cosine() -> None:
    def alone(q: Tensor, frequencies: Tensor) -> Any:
        return transformers_rotary(q, q * 2, frequencies, 1)[0]

    assert refused_rotary(alone, Q, (D // 2,)) == ["a query has no key beside it"]

    def swapped(q: Tensor, k: Tensor, frequencies: Tensor) -> Any:
        f = angles(frequencies, 6)
        cos, sin = f.sin().unsqueeze(1), f.cos().unsqueeze(1)
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin

    assert len(refused_rotary(swapped, Q, Q, (D // 2,))) == 1


def test_rotation_the_other_way_round_is_not_rotary() -> None:
    def fn(q: Tensor, k: Tensor, frequencies: Tensor) -> Any:
        f = angles(frequencies, 6)
        cos, sin = f.cos().unsqueeze(1), f.sin().unsqueeze(1)

        def turn(x: Tensor) -> Tensor:
            return torch.cat((x[..., D // 2 :], -x[..., : D // 2]), dim=-1)

        return q * cos + turn(q) * sin, k * cos + turn(k) * sin

    assert refused_rotary(fn, Q, Q, (D // 2,)) == []
