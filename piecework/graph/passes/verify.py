"""Checks a rewrite by numbers: the graph before and after it, on random inputs."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from piecework.errors import ConfigError
from piecework.graph.passes.aliases import inputs_of
from piecework.graph.passes.bounds import Bound, error
from piecework.graph.passes.equivalence import Claim, Difference, Regions, compare
from piecework.graph.passes.errors import VerificationError
from piecework.graph.passes.fakes import signature
from piecework.graph.passes.samples import TOKENS, Samples, assign


@dataclass(frozen=True)
class Verdict:
    """The largest error that was measured, and how many different rewrites were run."""

    error: float
    checked: int


def verify(
    name: str, before: Graph, after: Graph, bound: Bound, *, in_context: bool = False, constants: Any = None
) -> Verdict:
    """Run what changed between two graphs on random inputs and hold the results to `bound`.

    Every changed region is run for token counts of `TOKENS`, alike ones once. Where writes into memory
    changed, the whole graphs are run. `constants` is the module that the graph's get_attr nodes name.

    Raises VerificationError with the pass's name, where the results differ, and by how much.
    """
    difference = compare(before, after)
    if difference.effects:
        return _verify_whole(name, before, after, bound, constants)
    regions = Regions(before, after, difference)
    sources = [_Source(before, tokens, seed, in_context, constants) for seed, tokens in enumerate(TOKENS)]
    known: set[Any] = set()
    worst = 0.0
    for claim in difference.claims:
        sides = regions.of(claim)
        key = tuple(_shape_of(side, root) for side, root in zip(sides, _roots(claim), strict=True))
        if key in known:
            continue
        known.add(key)
        for source in sources:
            try:
                results = _run_sides(claim, difference, sides, source)
            except ConfigError:  # of the machine's settings, and not of the rewrite
                raise
            except Exception as failure:
                reason = f"the rewrite of {claim.before.name} fails for {source.tokens} tokens: {failure}"
                raise VerificationError(name, reason, math.inf, 0.0) from failure
            what = f"{claim.after.name} instead of {claim.before.name} (used by {claim.user})"
            worst = max(worst, _hold(name, what, results, bound, source.tokens))
    return Verdict(worst, len(known))


def _roots(claim: Claim) -> tuple[Node, Node]:
    return claim.before, claim.after


Sides = tuple[list[Node], list[Node]]


class _Source:
    """Where the values come from that a region needs: made up, or from a run of the graph."""

    def __init__(self, before: Graph, tokens: int, seed: int, in_context: bool, constants: Any) -> None:
        self.tokens = tokens
        self.samples = Samples(assign(before, tokens), seed, before)
        self._constants = constants
        self._before = before if in_context else None

    @functools.cached_property
    def _recorded(self) -> dict[str, Any]:
        assert self._before is not None
        values = _run(self._before, self.samples, self._constants)
        return {node.name: value for node, value in values.items()}

    def value(self, node: Node, number: int, twin: str | None) -> Any:
        """The value of a node that both graphs have; `twin` is its name in the old one."""
        if node.op == "get_attr":
            return getattr(self._constants, str(node.target))
        if self._before is not None and twin is not None:
            return self._recorded[twin]
        return self.samples.make(node, number)


def _run_sides(claim: Claim, difference: Difference, sides: Sides, source: _Source) -> list[Any]:
    results = []
    for side, root in zip(sides, _roots(claim), strict=True):
        values: dict[Node, Any] = {}
        for node in _outside(side, root):
            number = difference.numbers[node]
            values[node] = source.value(node, number, difference.names.get(number))
        for node in side:
            values[node] = _call(node, values, source.samples)
        results.append(values[root])
    return results


def _outside(side: list[Node], root: Node) -> list[Node]:
    inside = set(side)
    needed = dict.fromkeys(n for node in side for n in inputs_of(node) if n not in inside)
    return list(needed) if side else [root]


def _call(node: Node, values: dict[Node, Any], samples: Samples) -> Any:
    if isinstance(node.meta["val"], torch.SymInt):
        return samples.number(node.meta["val"])
    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: values[n])
    with torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _hold(name: str, what: str, results: list[Any], bound: Bound, tokens: int) -> float:
    worst = 0.0
    pairs = [r if isinstance(r, tuple | list) else (r,) for r in results]
    if len(pairs[0]) != len(pairs[1]):
        raise VerificationError(name, f"{what}: another number of results", math.inf, 0.0)
    for old, new in zip(*pairs, strict=True):
        if not isinstance(old, Tensor) or not isinstance(new, Tensor):
            measured, allowed = (0.0 if old == new else math.inf), 0.0
        else:
            measured, allowed = error(new, old), bound.allowed(old.dtype)
            share = bound.too_many(new, old)
            if share is not None and measured <= allowed:
                reason = f"{what}: {share:.0%} of the integers differ for {tokens} tokens"
                reason += f", allowed {bound.integers_off:.0%}"
                raise VerificationError(name, reason, share, bound.integers_off)
        if measured > allowed:
            reason = f"{what}: error {measured:.3g} for {tokens} tokens, allowed {allowed:g}"
            raise VerificationError(name, reason, measured, allowed)
        worst = max(worst, measured)
    return worst


def _verify_whole(name: str, before: Graph, after: Graph, bound: Bound, constants: Any) -> Verdict:
    worst = 0.0
    for index, tokens in enumerate(TOKENS):
        samples = Samples(assign(before, tokens), index, before)
        results = [_run_whole(graph, samples, constants) for graph in (before, after)]
        worst = max(worst, _hold(name, "the whole graph", results, bound, tokens))
    return Verdict(worst, 1)


def _run_whole(graph: Graph, samples: Samples, constants: Any) -> Any:
    """Run a graph from its inputs; gives its outputs, and its inputs as they are afterwards."""
    values = _run(graph, samples, constants)
    (output,) = graph.find_nodes(op="output")
    return tuple(values[n] for n in [*inputs_of(output), *graph.find_nodes(op="placeholder")])


def _run(graph: Graph, samples: Samples, constants: Any) -> dict[Node, Any]:
    values: dict[Node, Any] = {}
    for index, node in enumerate(graph.nodes):
        if node.op == "placeholder":
            values[node] = samples.make(node, index)
        elif node.op == "get_attr":
            values[node] = getattr(constants, str(node.target)).clone()
        elif node.op == "call_function":
            values[node] = _call(node, values, samples)
    return values


def _shape_of(side: list[Node], root: Node) -> Any:
    """What makes two regions alike: the same calls, wired alike, on inputs of the same shapes."""
    places: dict[Node, str] = {}
    for node in _outside(side, root):
        places[node] = f"in{len(places)}:{node.op}:{signature(node.meta['val'])}"
    lines: list[str] = []
    for node in side:
        lines.append(repr((str(node.target), map_arg((node.args, dict(node.kwargs)), lambda n: places[n]))))
        places[node] = f"n{len(lines)}"
    return (*places.values(), *lines)
