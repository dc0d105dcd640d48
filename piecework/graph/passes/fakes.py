"""The fake values of a graph's nodes: shapes, dtypes and strides, kept true while passes edit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from piecework.graph.passes.aliases import inputs_of
from piecework.graph.symbols import expression, symbolic_sizes


def value(node: Node) -> Any:
    """The fake value of a node: a tensor, a symbolic number, or a tuple of them."""
    return node.meta["val"]


def fake_mode(graph: Graph) -> FakeTensorMode:
    """The mode that the graph's fake tensors belong to, or a new one for a graph of real ones."""
    for node in graph.nodes:
        found = node.meta.get("val")
        if isinstance(found, FakeTensor):
            return found.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def signature(val: Any) -> Any:
    """What tells two fake values apart, as something that compares and hashes: sizes, strides, dtype."""
    if isinstance(val, Tensor):
        sizes = tuple(map(_plain, (*val.shape, *val.stride(), val.storage_offset())))
        return (sizes, val.dtype, val.device.type)
    if isinstance(val, list | tuple):
        return tuple(signature(v) for v in val)
    if isinstance(val, torch.SymInt | torch.SymFloat | torch.SymBool):
        return str(val.node.expr)
    return (type(val), repr(val))


def _plain(size: int | torch.SymInt) -> int | str:
    return size if isinstance(size, int) else str(expression(size))


def same_result(a: Any, b: Any) -> bool:
    """Whether two fake values have one shape, dtype and device; strides may differ."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        shapes = [list(map(_plain, t.shape)) for t in (a, b)]
        return shapes[0] == shapes[1] and a.dtype == b.dtype and a.device.type == b.device.type
    return bool(signature(a) == signature(b))


def run_fake(node: Node) -> Any:
    """Compute the fake value of one call from those of its arguments."""
    args, kwargs = map_arg((node.args, node.kwargs), value)
    with symbolic_sizes(), torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def settle(node: Node, val: Any) -> None:
    """Note a node's fake value as computed for the call that the node is now."""
    node.meta["val"] = val
    node.meta[_FOR] = call_text(node)


def refresh(graph: Graph, before: Graph | None = None) -> int:
    """Give every call its fake value again; returns how many had to be computed.

    A value stays where it was settled for this call, or where the call stands in `before`, the graph as it
    was, with arguments of the same fake values. A call that doesn't fit raises what its op raises.
    """
    old = {node.name: node for node in before.nodes} if before is not None else {}
    changed: set[Node] = set()
    computed = 0
    with fake_mode(graph):
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            twin = old.get(node.name)
            if not changed.intersection(inputs_of(node)) and "val" in node.meta:
                if node.meta.get(_FOR) == call_text(node):
                    continue
                if twin is not None and "val" in twin.meta and _same_inputs(node, twin):
                    node.meta["val"] = twin.meta["val"]
                    continue
            previous = node.meta.get("val")
            settle(node, run_fake(node))
            computed += 1
            if twin is not None and signature(previous) != signature(node.meta["val"]):
                changed.add(node)
    return computed


_FOR = "piecework_val_for"


def call_text(node: Node) -> str:
    """What a node calls, with the names of its arguments."""
    return repr((str(node.target), map_arg((node.args, dict(node.kwargs)), lambda a: f"%{a.name}")))


def _same_inputs(node: Node, twin: Node) -> bool:
    """Whether two calls are the same but for arguments that have the same fake values."""
    if node.target != twin.target:
        return False
    wires = [repr(map_arg((n.args, dict(n.kwargs)), lambda _: "%")) for n in (node, twin)]
    if wires[0] != wires[1]:
        return False
    pairs = zip(inputs_of(node), inputs_of(twin), strict=True)
    return all(
        a.meta["val"] is b.meta["val"] or signature(a.meta["val"]) == signature(b.meta["val"])
        for a, b in pairs
    )


def same_call(node: Node, other: Node) -> bool:
    """Whether two nodes of two graphs call the same thing with arguments of the same names."""
    return node.op == other.op and node.target == other.target and call_text(node) == call_text(other)


def propagate(graph_module: GraphModule, example_inputs: Sequence[Any]) -> None:
    """Give fake values to a graph that has none, from example inputs (real tensors, numbers).

    Sizes become those of the examples. Constants of the module are used as they are.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    examples = list(example_inputs)
    places = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    if len(places) != len(examples):
        raise ValueError(f"{len(examples)} example inputs for {len(places)} placeholders")
    for node, example in zip(places, examples, strict=True):
        is_tensor = isinstance(example, Tensor)
        node.meta["val"] = mode.from_tensor(example, static_shapes=True) if is_tensor else example
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            constant = getattr(graph_module, str(node.target))
            node.meta["val"] = mode.from_tensor(constant, static_shapes=True)
    refresh(graph_module.graph)


def copy_graph(graph: Graph) -> Graph:
    """Copy a graph; nodes keep their names, and share their fake values."""
    new = Graph()
    mapping: dict[Node, Node] = {}
    for node in graph.nodes:
        mapping[node] = new.node_copy(node, lambda n: mapping[n])
    for node, twin in mapping.items():
        assert node.name == twin.name, f"{node.name} became {twin.name}"
    new._codegen = graph._codegen
    return new
