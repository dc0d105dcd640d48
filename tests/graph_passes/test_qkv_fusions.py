"""From projection to attention: every kind of heads, norms and rotation; and what is none."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_models import EPS, fuse
from pass_graphs import OPS, count, function_graph
from torch import Tensor

POSITIONS = torch.empty(5, dtype=torch.int64)
NORM, PLAIN = "split_qkv_rmsnorm_rope", "split_qkv_rope"


def attend(
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 8,
    *,
    norms: bool = True,
    biases: str = "",
    interleaved: bool = False,
    change: Callable[..., Any] = lambda q, k, v: (q, k, v),
) -> Callable[..., Any]:
    """The function of a model's attention up to the hole; `change` may alter q, k, v before the rotation."""

    def fn(qkv: Tensor, positions: Tensor, cos_sin: Tensor, *weights: Tensor) -> Any:
        sizes = [heads * size, kv_heads * size, kv_heads * size]
        q, k, v = qkv.split(sizes, -1)
        q, k, v = q.view(-1, heads, size), k.view(-1, kv_heads, size), v.view(-1, kv_heads, size)
        rest = list(weights)
        if norms:
            q, k = OPS.rms_norm(q, rest.pop(0), EPS), OPS.rms_norm(k, rest.pop(0), EPS)
        if "q" in biases:
            q = q + rest.pop(0)
        if "k" in biases:
            k = k + rest.pop(0)
        q, k, v = change(q, k, v)
        q, k = OPS.rotary(positions, q, k, cos_sin, interleaved)
        return q, k, v

    return fn


def graph(
    fn: Any, *, heads: int = 4, kv_heads: int = 2, size: int = 8, rotated: int = 8, weights: Any = ()
) -> Any:
    tokens = torch.empty(5, (heads + 2 * kv_heads) * size)
    return function_graph(fn, tokens, POSITIONS, torch.empty(64, rotated), *weights)


@pytest.mark.parametrize("biases", ["", "q", "k", "qk"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_norms_with_and_without_biases(biases: str, interleaved: bool) -> None:
    module = graph(attend(biases=biases, interleaved=interleaved), weights=[(8,)] * (2 + len(biases)))
    assert (count(module, "piecework::rms_norm"), count(module, "piecework::rotary")) == (2, 1)
    longer, shorter = fuse(module, NORM, PLAIN)
    assert (longer.matches, longer.error, longer.refused, shorter.matches) == (1, 0.0, {}, 0)
    assert count(module, f"piecework::{NORM}") == 1
    left = ("aten::split_with_sizes", "aten::add", "piecework::rms_norm", "piecework::rotary")
    assert [count(module, op) for op in left] == [0] * 4
    values = ("aten::view", "aten::slice")  # of the projection; no result of the op
    assert [count(module, op) for op in values] == [1] * 2


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "rotated"),
    [(4, 2, 8, 8), (4, 4, 96, 96), (8, 1, 64, 16), (3, 1, 128, 128), (6, 2, 24, 6)],
)
def test_heads_of_every_size_and_partial_rotation(heads: int, kv_heads: int, size: int, rotated: int) -> None:
    for norms, interleaved in itertools.product((False, True), repeat=2):
        fn = attend(heads, kv_heads, size, norms=norms, interleaved=interleaved)
        weights = [(size,)] * 2 if norms else []
        module = graph(fn, heads=heads, kv_heads=kv_heads, size=size, rotated=rotated, weights=weights)
        longer, shorter = fuse(module, NORM, PLAIN)
        assert (longer.matches, shorter.matches) == (norms, not norms)
        assert (longer.error, shorter.error) == (0.0, 0.0)
        assert count(module, f"piecework::{NORM if norms else PLAIN}") == 1
        assert count(module, "piecework::rotary") == 0


def test_one_weight_for_both_norms() -> None:
    def fn(qkv: Tensor, positions: Tensor, cos_sin: Tensor, weight: Tensor) -> Any:
        return attend()(qkv, positions, cos_sin, weight, weight)

    (entry,) = fuse(graph(fn, weights=[(8,)]), NORM)
    assert (entry.matches, entry.error) == (1, 0.0)


def other_eps(qkv: Tensor, positions: Tensor, cos_sin: Tensor, qw: Tensor, kw: Tensor) -> Any:
    q, k, v = qkv.split([32, 16, 16], -1)
    q, k = OPS.rms_norm(q.view(-1, 4, 8), qw, 1e-5), OPS.rms_norm(k.view(-1, 2, 8), kw, 1e-6)
    q, k = OPS.rotary(positions, q, k, cos_sin)
    return q, k, v.view(-1, 2, 8)


REFUSED = {
    "the normed queries are read elsewhere": (
        attend(change=lambda q, k, v: (q, k, v * q.sum())),
        [(8,)] * 2,
        "the intermediate result of piecework.rms_norm has another user",
    ),
    "gamma of another dtype": (attend(), [torch.empty(8, dtype=torch.float64), (8,)], None),
    "gamma for all heads at once": (attend(), [(4, 8), (8,)], "its condition does not hold"),
    "two epsilons": (other_eps, [(8,)] * 2, None),
    "queries are scaled": (attend(change=lambda q, k, v: (q * 2, k, v)), [(8,)] * 2, None),
    "one norm only": (
        lambda x, p, c, w: OPS.rotary(
            p, OPS.rms_norm(x[:, :32].view(-1, 4, 8), w, EPS), x[:, 32:48].view(-1, 2, 8), c
        ),
        [(8,)],
        None,
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_left_alone(why: str) -> None:
    fn, weights, reason = REFUSED[why]
    module = graph(fn, weights=weights)
    longer, shorter = fuse(module, NORM, PLAIN)
    assert (longer.matches, shorter.matches, count(module, "piecework::rotary")) == (0, 0, 1)
    if reason is not None:
        assert reason in longer.refused


def test_heads_that_are_no_part_of_a_packed_projection() -> None:
    def fn(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> Any:
        return OPS.rotary(positions, q.view(-1, 4, 8), k.view(-1, 2, 8), cos_sin)

    module = function_graph(fn, torch.empty(5, 32), torch.empty(5, 16), POSITIONS, torch.empty(64, 8))
    (entry,) = fuse(module, PLAIN)
    assert (entry.matches, count(module, "piecework::rotary")) == (0, 1)


def test_values_that_are_of_other_rows_do_not_match() -> None:
    """Parts are cut so that a view as heads takes rows from the next token."""

    def fn(qkv: Tensor, positions: Tensor, cos_sin: Tensor) -> Any:
        q, k, v = qkv.split([32, 16, 16], -1)
        q, k = OPS.rotary(positions, q.reshape(-1, 2, 8), k.reshape(-1, 1, 8), cos_sin)
        return q, k, v.reshape(-1, 1, 8)

    positions = torch.empty(10, dtype=torch.int64)
    module = function_graph(fn, torch.empty(5, 64), positions, torch.empty(64, 8))
    (entry,) = fuse(module, PLAIN, verify=False)
    assert entry.matches == 0 and count(module, "piecework::rotary") == 1
