"""What a pass is: a pair of functions over named ops, or a function that edits a graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.fx import Graph, Node

from piecework.graph.passes.bounds import BITWISE, Bound
from piecework.graph.passes.errors import PassError
from piecework.graph.passes.report import Rewrite

EACH_LAYER: Literal["each_layer"] = "each_layer"
AT_LEAST_ONE: Literal["at_least_one"] = "at_least_one"

Expectation = Literal["each_layer", "at_least_one"] | int | None
"""`each_layer`: a multiple of the number of layers, not zero; a number: just that; None: anything."""


@dataclass(frozen=True)
class PassContext:
    """What a pass may ask about the graph it gets.

    Attributes:
        device: the device's kind, `cpu`, `cuda`, ...
        dtype: the weights' dtype; None for a graph without floating-point inputs.
        layers: how many layers the model has; where nobody says, how many splitting ops there are.
        splitting_ops: the ops between the pieces, as `namespace::name`.
        parameters: what the model's configuration says (eps, head_dim, ...), by name.
    """

    device: str
    dtype: torch.dtype | None
    layers: int
    splitting_ops: frozenset[str]
    parameters: dict[str, Any]


@dataclass
class Outcome:
    """What a pass did. `refused` counts by reason what looked like a match and was left alone.

    `rewrites` are the matches as text, for people to look at; where a pass gives none, the manager lists
    the nodes that went and came.
    """

    matches: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    rewrites: list[Rewrite] = field(default_factory=list)


class Match:
    """One place where a pattern fits. `match["x"]` is what the placeholder x stands for.

    That is a node, or a plain value where the pattern's placeholder met a literal; `value` gives the fake
    tensor instead of a node. `outputs` are the nodes that the pattern returns, `nodes` all that it covers.
    """

    def __init__(self, bound: dict[str, Any], nodes: Sequence[Node], outputs: Sequence[Node]) -> None:
        self._bound = bound
        self.nodes = tuple(nodes)
        self.outputs = tuple(outputs)

    def __getitem__(self, name: str) -> Any:
        return self._bound[name]

    @property
    def bound(self) -> dict[str, Any]:
        """Every placeholder's name with what it stands for, in the pattern's order."""
        return dict(self._bound)

    def value(self, name: str) -> Any:
        """The fake tensor, or the literal, that the placeholder `name` stands for."""
        found = self._bound[name]
        return found.meta["val"] if isinstance(found, Node) else found

    def same_dtype(self, *names: str) -> bool:
        """Whether the placeholders `names` are all tensors, of one dtype."""
        values = [self.value(name) for name in names]
        return all(isinstance(v, torch.Tensor) and v.dtype == values[0].dtype for v in values)

    def same_shape(self, *names: str) -> bool:
        """Whether the placeholders `names` are all tensors, of one shape."""
        values = [self.value(name) for name in names]
        return all(isinstance(v, torch.Tensor) for v in values) and all(
            str(tuple(v.shape)) == str(tuple(values[0].shape)) for v in values
        )


@dataclass(frozen=True, kw_only=True)
class Pass(ABC):
    """What all passes have.

    Attributes:
        name: by which it is reported and disabled.
        bound: how far it may change numbers; `verify` holds it to that. Say so if it is not `BITWISE`.
        expect: how many matches a model should give, see `Expectation`.
        devices, dtypes: where it runs; None is everywhere.
        in_context: the rewrite is right only because of how its inputs are computed (two halves that are
            known to be equal). Verification then takes them from a run of the whole graph, and does not
            make them up.
        version: goes into the key of compiled pieces; raise it when the pass changes.
    """

    name: str
    bound: Bound = BITWISE
    expect: Expectation = None
    devices: tuple[str, ...] | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    in_context: bool = False
    version: int = 1

    def skipped(self, context: PassContext) -> str | None:
        """Why the pass does not run in `context`; None if it does."""
        if self.devices is not None and context.device not in self.devices:
            return f"not for device {context.device} (for {', '.join(self.devices)})"
        if self.dtypes is not None and context.dtype not in self.dtypes:
            return f"not for {context.dtype} (for {', '.join(map(str, self.dtypes))})"
        return None

    @abstractmethod
    def run(self, graph: Graph, context: PassContext) -> Outcome:
        """Edit `graph` in place."""


@dataclass(frozen=True, kw_only=True)
class GraphPass(Pass):
    """A function `rewrite(graph, context)` that edits the graph in place and returns how often it did.

    It may return an `Outcome` instead, to say what it refused. Nodes that it adds need no fake value:
    the manager computes them. Inputs and outputs of the graph must stay. A node that is kept must get
    the same values as before; make a new one where it should compute something else.
    """

    rewrite: Callable[[Graph, PassContext], int | Outcome]

    def run(self, graph: Graph, context: PassContext) -> Outcome:
        """Call the function."""
        done = self.rewrite(graph, context)
        if isinstance(done, Outcome):
            return done
        if isinstance(done, bool) or not isinstance(done, int) or done < 0:
            raise PassError(self.name, f"returned {done!r}, neither a number of rewrites nor an Outcome")
        return Outcome(matches=done)
