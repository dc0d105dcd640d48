"""A program's flat graph with attention over the KV cache inside, for compilers that take whole programs.

`attention` has no argument for the cache, so each call becomes one of `paged_attention`: the step's index
tensors and the layer's keys and values become inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from piecework.graph.program import ATTENTION
from piecework.graph.split import op_name
from piecework.graph.symbols import symbolic_sizes
from piecework.ops.attention import attention, paged_attention
from piecework.ops.attention_int8 import paged_attention_int8

INDEX = ("slots", "page_table", "query_starts", "context_lengths")
_ONE_ROW = 1  # of each sequence: the program is one of decode


@dataclass(frozen=True)
class WholeGraph:
    """The rewritten graph; `added` names its new inputs, which follow the others, in order."""

    graph_module: fx.GraphModule
    added: tuple[str, ...]


def with_paged_attention(graph: fx.Graph, tensors: Mapping[str, Tensor]) -> WholeGraph:
    """Copy `graph` with `paged_attention` in place of `attention`.

    Args:
        graph: flat, its nodes with values in `meta["val"]`.
        tensors: the index tensors of a step, by the names of `INDEX`, whose first dimension is that of the
            step (for query_starts one more), and `keys.<layer>` and `values.<layer>` of the cache, where it
            is int8 also `key_scales.<layer>` and `value_scales.<layer>`.
    """
    copy = fx.Graph()
    seen: dict[fx.Node, fx.Node] = {}
    nodes = list(graph.nodes)
    for node in nodes:
        if node.op == "placeholder":
            seen[node] = copy.node_copy(node)
    calls = {node: _arguments(node) for node in nodes if node.op == "call_function" and _is_attention(node)}
    scaled = any(name.startswith("key_scales.") for name in tensors)
    kinds = ("keys", "values", *(("key_scales", "value_scales") if scaled else ()))
    op = paged_attention_int8 if scaled else paged_attention
    names = list(INDEX)
    names += [f"{kind}.{call['layer']}" for call in calls.values() for kind in kinds]
    rows = next(iter(calls.values()))["q"].meta["val"]
    added = {name: _placeholder(copy, name, tensors[name], rows) for name in dict.fromkeys(names)}
    for node in nodes:
        if node.op == "placeholder":
            continue
        if node not in calls:
            seen[node] = copy.node_copy(node, lambda n: seen[n])
            continue
        call = calls[node]
        cache = [added[f"{kind}.{call['layer']}"] for kind in kinds]
        inside = [seen[call[name]] for name in ("q", "k", "v", "out")]
        index = [added[name] for name in INDEX]
        args = (*inside, *cache, *index, _ONE_ROW, call["scale"], call["window"])
        seen[node] = copy.call_function(op.overload, args)
        seen[node].meta["val"] = None
    copy.lint()
    return WholeGraph(fx.GraphModule(nn.Module(), copy), tuple(added))


def _is_attention(node: fx.Node) -> bool:
    return op_name(node.target) == ATTENTION


def _arguments(node: fx.Node) -> dict[str, Any]:
    names = [argument.name for argument in attention.overload._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _placeholder(graph: fx.Graph, name: str, tensor: Tensor, rows: Tensor) -> fx.Node:
    """Add an input like `tensor`; an index tensor has a row for each of the step, however many."""
    node = graph.placeholder(name.replace(".", "_"))
    shape: tuple[Any, ...] = tuple(tensor.shape)
    if name in INDEX:
        first = rows.shape[0] + 1 if name == "query_starts" else rows.shape[0]
        shape = (first, *shape[1:])
    with symbolic_sizes(), rows.fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    return node
