"""A trace is one graph for all token counts, and says why where there can't be one."""

from __future__ import annotations

import logging
import operator
from typing import Any

import pytest
import torch
from programs import inputs_of, options, random_model
from torch import Tensor, nn

from piecework.graph.build import build
from piecework.graph.trace import TraceError, trace


def _tokens(count: int = 5) -> list[Tensor]:
    return [torch.arange(count), torch.arange(count)]


def test_graph_of_a_model_holds_named_ops_and_no_sizes() -> None:
    model = random_model("llama", 2)
    traced = trace(model, _tokens(), names=["input_ids", "positions"])
    calls = [n for n in traced.graph_module.graph.nodes if n.op == "call_function"]
    kinds = {str(n.target) for n in calls if n.target is not operator.getitem}
    assert kinds == {
        *(f"piecework.{op}.default" for op in ("embedding", "rms_norm", "linear", "rotary")),
        *("piecework.silu_and_mul.default", "piecework.attention.default"),
        *("aten.view.default", "aten.split_with_sizes.default", "aten.empty_like.default"),
        "aten.add.Tensor",
    }
    assert not any(isinstance(n.meta["val"], torch.SymInt) for n in calls)
    assert [b.name for b in traced.bindings if b.kind == "input"] == ["input_ids", "positions"]
    assert all("val" in n.meta for n in traced.graph_module.graph.nodes if n.op != "output")


def test_graph_equals_the_model_for_any_count() -> None:
    model = random_model("qwen3", 2)
    traced = trace(model, _tokens())
    for count in (1, 2, 7, 64):
        inputs = inputs_of(model, count)
        arguments = [b.tensor if b.tensor is not None else inputs.pop(0) for b in traced.bindings]
        (got,) = traced.graph_module(*arguments)
        torch.testing.assert_close(got, model(*inputs_of(model, count)), rtol=1e-5, atol=1e-5)


class Sizes(nn.Module):
    """Uses the token count as a number, also in sums and products, and a constant of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.tensor([2.0])

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[0]
        padded = torch.cat((x, x.new_zeros(2 * count + 1, x.shape[1])))
        total: Tensor = padded.view(3 * count + 1, -1)[:count] * self.scale + count
        return total


def test_sizes_are_computed_from_the_input() -> None:
    traced = trace(Sizes(), [torch.ones(5, 4)])
    sources = [n for n in traced.graph_module.graph.nodes if n.target is torch.ops.aten.sym_size.int]
    assert len(sources) == 1 and sources[0].args[0].op == "placeholder"
    assert [b.kind for b in traced.bindings] == ["weight", "input"]
    for count in (1, 3, 8):
        x = torch.randn(count, 4)
        (got,) = traced.graph_module(traced.bindings[0].tensor, x)
        torch.testing.assert_close(got, Sizes()(x))


class LooksAtValues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return -x


class ReadsANumber(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.max().item()


class ShapeFromValues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


class BranchesOnOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] == 1 else x


class BranchesOnMany(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 16 else x


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (LooksAtValues(), "values that only a run has.*if x.sum"),
        (ReadsANumber(), "values that only a run has.*item"),
        (ShapeFromValues(), "values that only a run has.*x > 0"),
        (BranchesOnOne(), "number of tokens"),
        (BranchesOnMany(), "number of tokens"),
    ],
)
def test_what_cannot_be_traced_runs_as_one_hole(
    model: nn.Module, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    example = torch.ones(5, 3)
    with pytest.raises(TraceError, match=reason):
        trace(model, [example])
    with pytest.raises(TraceError, match=reason):
        build(model, ["x"], [example], options(strict=True))
    made = options()
    with caplog.at_level(logging.WARNING, logger="piecework.graph"):
        program = build(model, ["x"], [example], made)
    assert [r.levelname for r in caplog.records if r.name == "piecework.graph"] == ["WARNING"]
    assert program.opaque_reason is not None and program.opaque_reason in caplog.text
    assert (program.num_pieces, program.num_holes, made.counters.traces) == (0, 1, 0)
    for count in (1, 20):
        x = torch.randn(count, 3)
        torch.testing.assert_close(program.run([x]), model(x))


def test_opaque_program_fills_the_attention_of_its_model() -> None:
    model = random_model("llama", 2)
    layer = model.model.layers[0]
    plain = layer.forward

    def forward(h: Tensor, *rest: Any) -> Tensor:
        return plain(h, *rest) if float(h.abs().max()) < 1e9 else h

    layer.forward = forward
    program = build(model, ["ids", "positions"], _tokens(), options())
    assert program.opaque_reason is not None
    seen: list[int] = []

    def fill(number: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        seen.append(number)
        torch.ops.piecework.attention(q, k, v, out, number, model.attention_specs[number].scale, 0)

    inputs = inputs_of(model, 4)
    got = program.run(inputs, fill)
    assert seen == [0, 1]
    torch.testing.assert_close(got, model(*inputs))


def test_traces_under_inference_mode_and_with_gradients_on() -> None:
    model = random_model("llama", 2)
    with torch.inference_mode():
        inside = trace(model, _tokens())
    with torch.enable_grad():
        outside = trace(model, _tokens())
    assert inside.graph_module.code == outside.graph_module.code
