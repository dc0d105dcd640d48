"""A stub of a vendor's compiler: it is registered with torch.compile, and runs graphs as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends import registry

NAME = "stub_vendor"


@dataclass(eq=False)
class Vendor:
    """What the compiler got.

    `whole` are sequences and calls of attention of each program with attention inside, `pieces` counts the
    others, `calls` the runs of whole programs. `change` is made to the results of those, and without
    `gives_function` there is none of them.
    """

    whole: list[tuple[int, int]] = field(default_factory=list)
    pieces: int = 0
    calls: int = 0
    change: Callable[[Any], Any] = lambda results: results
    gives_function: bool = True

    def __call__(self, graph_module: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any] | None:
        """Take a graph and inputs without data, as torch.compile gives them."""
        target = torch.ops.piecework.paged_attention.default
        attention = [node for node in graph_module.graph.nodes if node.target is target]
        if not attention:
            self.pieces += 1
            return graph_module.forward
        assert all(isinstance(n, int) for x in inputs for n in (*x.shape, *x.stride())), "static shapes only"
        self.whole.append((attention[0].args[0].meta["val"].shape[0], len(attention)))

        def call(*tensors: Tensor) -> Any:
            assert [t.shape for t in tensors] == [x.shape for x in inputs]
            self.calls += 1
            return self.change(graph_module.forward(*tensors))

        return call if self.gives_function else None


@contextmanager
def registered(vendor: Vendor) -> Iterator[Vendor]:
    """Register it for the time of the block."""
    registry.register_backend(vendor, name=NAME)
    try:
        yield vendor
    finally:
        for known in (registry._BACKENDS, registry._COMPILER_FNS):
            known.pop(NAME, None)  # type: ignore[attr-defined]
