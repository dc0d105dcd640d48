"""Every spelling of the same views, splits and casts comes out as one form, and computes the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pass_graphs import OPS, calls, count, function_graph
from torch import Tensor
from torch.fx import GraphModule

from piecework.graph.passes import PassManager, PatternPass

QKV, HEADS, KV, D = 128, 4, 2, 16  # 4 * 16 + 2 * 16 + 2 * 16 columns


def split_then_view(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = x.split([64, 32, 32], 1)
    return q.view(-1, 4, 16), k.view(-1, 2, 16), v.view(-1, 2, 16)


def split_with_negative_dim_and_reshape(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.split(x, [64, 32, 32], dim=-1)
    return q.reshape(x.shape[0], 4, 16), k.reshape(x.shape[0], 2, -1), v.reshape(x.shape[0], -1, 16)


def slices(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x[:, :64].view(-1, 4, 16), x[:, 64:96].view(-1, 2, 16), x[:, -32:].view(-1, 2, 16)


def slices_of_the_last_dim(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    t = x.size(0)
    q, k, v = x[..., :64], x[..., 64:96], x[..., 96:]
    return q.view(t, 4, 16), k.view(t, 2, 16), v.view(t, 2, 16)


def view_then_split_heads(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = x.view(-1, 8, 16).split([4, 2, 2], dim=-2)
    return q, k, v


def narrow_and_unflatten(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    parts = x.narrow(-1, 0, 64), x.narrow(1, 64, 32), x.narrow(-1, 96, 32)
    q, k, v = (part.unflatten(-1, (-1, 16)) for part in parts)
    return q, k, v


def two_steps_and_needless_ones(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = x.contiguous().to(x.dtype).split_with_sizes([64, 32, 32], -1)
    return q.view(-1, 2, 2, 16).view(-1, 4, 16), k.view(-1, 2, 16), v.view(-1, 32).view(-1, 2, 16)


def heads_by_slices(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    heads = x.view(x.shape[0], 8, 16)
    return heads[:, :4], heads[:, 4:6], heads[:, 6:]


SPELLINGS = [
    split_then_view,
    split_with_negative_dim_and_reshape,
    slices,
    slices_of_the_last_dim,
    view_then_split_heads,
    narrow_and_unflatten,
    two_steps_and_needless_ones,
    heads_by_slices,
]


def with_rotary(spelling: Callable[[Tensor], tuple[Tensor, ...]]) -> Callable[..., Any]:
    def fn(x: Tensor, positions: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        q, k, v = spelling(x)
        q, k = OPS.rotary(positions, q, k, table)
        return q, k, v

    return fn


def graph_of(spelling: Callable[..., Any], tokens: Any) -> GraphModule:
    positions = torch.empty(7, dtype=torch.int64)
    rows = (tokens, QKV)
    if tokens == "T":
        # positions must be as symbolic as the rows: they are made from them.
        def fn(x: Tensor, table: Tensor) -> Any:
            return with_rotary(spelling)(x, torch.arange(x.shape[0]), table)

        return function_graph(fn, rows, (64, 16))
    return function_graph(with_rotary(spelling), rows, positions, (64, 16))


def qkv_pass() -> PatternPass:
    def pattern(x: Tensor, positions: Tensor, table: Tensor) -> Any:
        q, k, v = x.split([64, 32, 32], -1)
        q, k = OPS.rotary(positions, q.view(-1, 4, 16), k.view(-1, 2, 16), table)
        return q, k, v.view(-1, 2, 16)

    def replacement(x: Tensor, positions: Tensor, table: Tensor) -> Any:
        q, k, v = x.split([64, 32, 32], -1)
        q, k = OPS.rotary(positions, q.reshape(-1, 4, 16), k.reshape(-1, 2, 16), table)
        return q, k, v.reshape(-1, 2, 16).clone()

    return PatternPass(name="qkv", pattern=pattern, replacement=replacement, expect=1)


def form(module: GraphModule) -> list[str]:
    """What a graph computes, as one expression for each output; names and order leave no trace."""
    text: dict[Any, str] = {}
    for node in module.graph.nodes:
        args = torch.fx.map_arg(node.args, lambda a: text[a])
        text[node] = str(node.target) if node.op == "placeholder" else f"{node.target}{args}"
    output = next(n for n in module.graph.nodes if n.op == "output")
    return [text[n] for n in output.args[0]]


@pytest.mark.parametrize("tokens", ["T", 7])
def test_all_spellings_of_a_qkv_split_have_one_form(tokens: Any) -> None:
    forms = {}
    for spelling in SPELLINGS:
        module = graph_of(spelling, tokens)
        PassManager(module, verify=True, strict=True).apply()
        forms[spelling.__name__] = form(module)
    first = forms["split_then_view"]
    assert [name for name, lines in forms.items() if lines != first] == []
    assert len(forms) == 8 and "split_with_sizes" in first[0]


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: s.__name__)
@pytest.mark.parametrize("tokens", ["T", 7])
def test_one_pattern_matches_every_spelling(spelling: Callable[..., Any], tokens: Any) -> None:
    module = graph_of(spelling, tokens)
    x, table = torch.randn(7, QKV), torch.randn(64, 16)
    inputs = (x, table) if tokens == "T" else (x, torch.arange(7), table)
    expected = module(*inputs)
    manager = PassManager(module, verify=True, strict=True)
    manager.add(qkv_pass)
    assert manager.apply()["qkv"].matches == 1
    torch.testing.assert_close(module(*inputs), expected, rtol=0, atol=0)


def test_without_the_canonical_form_only_few_spellings_match() -> None:
    matched = []
    for spelling in SPELLINGS:
        manager = PassManager(graph_of(spelling, "T"))
        manager.disable("canonicalise")
        manager.add(qkv_pass)
        matched.append(manager.apply()["qkv"].matches)
    assert 0 < sum(matched) < len(SPELLINGS)


def canonical(fn: Callable[..., Any], *shapes: Any, dtype: torch.dtype = torch.float32) -> GraphModule:
    module = function_graph(fn, *shapes, dtype=dtype)
    PassManager(module, verify=True, strict=True).apply()
    return module


def test_calls_without_work_are_removed() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.to(torch.float32).contiguous().detach().expand(-1, 4)
        y = y.transpose(0, 1).transpose(1, 0)
        y = torch.nn.functional.dropout(y, 0.5, training=False)
        return y[:, 0:4].view(-1, 4) + 1

    module = canonical(fn, ("T", 4))
    assert [n.name for n in module.graph.nodes if n.op == "call_function"] == ["add"]


def test_what_does_something_stays() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.transpose(0, 1).contiguous()
        return (y[1:3] + y[0:2]).to(torch.float16)

    module = canonical(fn, ("T", 4))
    assert (count(module, "aten::contiguous"), count(module, "aten::slice")) == (1, 2)
    assert count(module, "aten::to") == 1


def test_a_reshape_that_copies_stays_a_reshape() -> None:
    module = canonical(lambda x: x.transpose(0, 1).reshape(-1) * 2, (6, 4))
    assert (count(module, "aten::reshape"), count(module, "aten::view")) == (1, 0)


def test_slices_that_overlap_or_leave_a_gap_stay_slices() -> None:
    module = canonical(lambda x: (x[:, :5] * 2, x[:, 4:] * 2), ("T", 8))
    assert (count(module, "aten::slice"), count(module, "aten::split_with_sizes")) == (2, 0)
    module = canonical(lambda x: (x[:, :3] * 2, x[:, 4:] * 2), ("T", 8))
    assert (count(module, "aten::slice"), count(module, "aten::split_with_sizes")) == (2, 0)


def test_chunk_and_split_by_size_are_splits_with_sizes() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        a, b = x.chunk(2, -1)
        c, d = x.split(5, 1)
        return a * 2, b * 2, c * 2, d * 2

    module = canonical(fn, ("T", 8))
    assert [n.args[1:] for n in calls(module, "aten::split_with_sizes")] == [([4, 4], 1), ([5, 3], 1)]


def test_an_empty_tensor_in_a_cat_is_dropped_but_not_if_the_result_is_written() -> None:
    def fn(x: Tensor, empty: Tensor) -> Tensor:
        return torch.cat([empty, x], 0) * 2

    assert count(canonical(fn, ("T", 4), (0,)), "aten::cat") == 0

    def written(x: Tensor, empty: Tensor) -> Tensor:
        return torch.cat([empty, x], 0).mul_(2)

    assert count(canonical(written, ("T", 4), (0,)), "aten::cat") == 1


def test_casts_have_one_spelling() -> None:
    def fn(x: Tensor, like: Tensor) -> tuple[Tensor, ...]:
        wide = x.float()
        return wide, x.to("cpu", torch.float32), x.type_as(like.float()), x.to(dtype=torch.float32)

    module = canonical(fn, ("T", 4), ("T", 4), dtype=torch.bfloat16)
    targets = {str(n.target) for n in module.graph.nodes if n.op == "call_function"}
    assert targets == {"aten.to.dtype"}
