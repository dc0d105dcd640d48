"""Fused graphs against single ops, at the declared bound, over tokens, sizes and dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_models import CASES, Case, case_graph, fuse, inputs
from pass_graphs import function_graph
from test_qkv_fusions import attend

from piecework.graph.passes.bounds import error
from piecework.graph.passes.fusions import FUSIONS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOKENS = (1, 7, 256, 533, 2049)
HEADS = {64: (1, 1, 16), 576: (9, 3, 64), 3392: (53, 53, 64), 4096: (32, 8, 128)}
"""Heads, key heads and their size, for a hidden size."""


def hold(name: str, got: Any, expected: Any) -> None:
    bound = FUSIONS[name]().bound
    got, expected = ([r] if isinstance(r, torch.Tensor) else list(r) for r in (got, expected))
    for one, other in zip(got, expected, strict=True):
        assert error(one, other) <= bound.allowed(other.dtype)


def check_case(case: Case, tokens: tuple[int, ...], hidden: int, dtype: torch.dtype) -> None:
    module = case_graph(case, hidden, dtype)
    single = [module(*inputs(case, n, hidden, dtype)) for n in tokens]
    assert fuse(module, case.after, verify=False)[0].matches == 1
    for n, expected in zip(tokens, single, strict=True):
        hold(case.after, module(*inputs(case, n, hidden, dtype)), expected)


def check_heads(norms: bool, tokens: tuple[int, ...], hidden: int, dtype: torch.dtype) -> None:
    heads, kv_heads, size = HEADS[hidden]
    width = (heads + 2 * kv_heads) * size
    weights = [(size,)] * (2 * norms)

    def traced(qkv: Any, positions: Any, table: Any, *w: Any) -> Any:
        return attend(heads, kv_heads, size, norms=norms)(qkv, positions, table.float(), *w)

    name = "split_qkv_rmsnorm_rope" if norms else "split_qkv_rope"
    for n in tokens:
        generator = torch.Generator().manual_seed(n)
        qkv = torch.randn(n, width, generator=generator).to(dtype)
        positions = torch.randint(0, 128, (n,), generator=generator)
        table = torch.randn(128, size, generator=generator).to(dtype)
        gammas = [torch.randn(shape, generator=generator).to(dtype) for shape in weights]
        module = function_graph(traced, qkv, positions, table, *weights, dtype=dtype)
        expected = module(qkv, positions, table, *gammas)
        assert fuse(module, name, verify=False)[0].matches == 1
        hold(name, module(qkv, positions, table, *gammas), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_a_few_sizes(case: Case, dtype: torch.dtype) -> None:
    check_case(case, (1, 33), 576, dtype)


@pytest.mark.parametrize("norms", [False, True])
def test_heads_at_a_few_sizes(norms: bool) -> None:
    check_heads(norms, (1, 33), 576, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", HEADS)
@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_the_grid(case: Case, hidden: int, dtype: torch.dtype) -> None:
    check_case(case, TOKENS, hidden, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", HEADS)
@pytest.mark.parametrize("norms", [False, True])
def test_the_grid_of_heads(norms: bool, hidden: int, dtype: torch.dtype) -> None:
    check_heads(norms, TOKENS, hidden, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_the_grid_in_plain_torch(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The references mean the same bits fused and single, whatever kernels there are."""
    from piecework import ops

    for name in ops.names():
        monkeypatch.delitem(ops.get(name).implementations, "cpu", raising=False)
    module = case_graph(case, 576, dtype)
    values = inputs(case, 533, 576, dtype)
    expected = module(*values)
    assert fuse(module, case.after, verify=False)[0].matches == 1
    got = module(*values)
    pairs = zip(*(([r] if isinstance(r, torch.Tensor) else r) for r in (got, expected)), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
