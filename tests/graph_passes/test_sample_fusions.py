"""Two sample fusions on real models: they match just as often as they should, and compute the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pass_graphs import (
    MODELS,
    OPS,
    add_rms_norm,
    count,
    function_graph,
    model_graph,
    qkv_norm_rope,
    random_model,
    warnings_of,
)
from torch import Tensor

from piecework.graph.passes import PassManager, PatternPass
from piecework.graph.trace import trace

LAYERS = {"llama": 3, "qwen2": 3, "qwen3": 3, "qwen3_moe": 4}


def weights_and_inputs(model: Any, tokens: int) -> list[Tensor]:
    """What the graph's placeholders stand for, by the order in which the model has its tensors."""
    traced = trace(model, [torch.arange(5), torch.arange(5)], names=["input_ids", "positions"])
    inputs = {"input_ids": torch.arange(tokens) % 300, "positions": torch.arange(tokens)}
    return [b.tensor if b.tensor is not None else inputs[b.name] for b in traced.bindings]


@pytest.mark.parametrize(("name", "eps"), [*((name, 1e-5) for name in MODELS), ("llama", 1e-6)])
def test_add_rms_norm_matches_two_times_per_layer(name: str, eps: float) -> None:
    model = random_model(name, rms_norm_eps=eps)
    module = model_graph(model)
    arguments = weights_and_inputs(model, 7)
    expected = module(*arguments)
    norms = count(module, "piecework::rms_norm")
    manager = PassManager(module, verify=True)
    manager.add(add_rms_norm, eps=eps)
    entry = manager.apply()["add_rms_norm"]
    assert (entry.status, entry.matches, entry.error) == ("applied", 2 * LAYERS[name], 0.0)
    assert count(module, "passtest::add_rms_norm") == 2 * LAYERS[name]
    assert count(module, "piecework::rms_norm") == norms - 2 * LAYERS[name]
    assert count(module, "aten::add") == 0
    torch.testing.assert_close(module(*arguments), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_another_eps_matches_nothing_and_says_so(name: str, caplog: pytest.LogCaptureFixture) -> None:
    module = model_graph(random_model(name, rms_norm_eps=1e-5))
    manager = PassManager(module)
    manager.add(add_rms_norm, eps=1e-6)
    assert manager.apply()["add_rms_norm"].matches == 0
    assert warnings_of(caplog) == [
        f"pass add_rms_norm: 0 matches, expected a multiple of {LAYERS[name]} layers"
    ]


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        *((name, {}) for name in MODELS),
        ("qwen3", {"head_dim": 96}),
        ("qwen3", {"num_key_value_heads": 4}),
    ],
)
def test_qkv_norm_rope_matches_where_there_are_norms(name: str, overrides: dict[str, int]) -> None:
    model = random_model(name, **overrides)
    module = model_graph(model)
    arguments = weights_and_inputs(model, 7)
    expected = module(*arguments)
    manager = PassManager(module, verify=True)
    manager.add(qkv_norm_rope)
    entry = manager.apply()["qkv_norm_rope"]
    matches = LAYERS[name] if "qwen3" in name else 0
    assert entry.matches == count(module, "passtest::qkv_norm_rope") == matches
    assert count(module, "piecework::rotary") == LAYERS[name] - matches
    torch.testing.assert_close(module(*arguments), expected, rtol=0, atol=0)


def test_norms_of_queries_and_keys_may_be_one_tensor() -> None:
    model = random_model("qwen3")
    for layer in model.model.layers:
        layer.self_attn.k_norm = layer.self_attn.q_norm
    module = model_graph(model)
    manager = PassManager(module, verify=True)
    manager.add(qkv_norm_rope)
    assert manager.apply()["qkv_norm_rope"].matches == 3


def _norms(residual: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = residual + x
    return OPS.rms_norm(h, weight, 1e-5), h


def one_match(fn: Any, *shapes: Any) -> tuple[int, list[str]]:
    manager = PassManager(function_graph(fn, *shapes))
    manager.add(add_rms_norm, eps=1e-5, expect=None)
    entry = manager.apply()["add_rms_norm"]
    return entry.matches, list(entry.refused)


H = ("T", 16)


def test_it_matches_when_all_conditions_hold() -> None:
    assert one_match(_norms, H, H, (16,)) == (1, [])


def test_another_user_of_an_intermediate_is_respected() -> None:
    def pattern_without_sum(residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return OPS.rms_norm(residual + x, weight, 1e-5)

    for fn, expected in ((_norms, 0), (lambda r, x, w: _norms(r, x, w)[0], 1)):
        manager = PassManager(function_graph(fn, H, H, (16,)))
        manager.add(
            PatternPass(
                name="sum_is_lost",
                pattern=pattern_without_sum,
                replacement=lambda residual, x, weight: OPS.rms_norm(residual + x, weight, 1e-5) * 1.0,
            )
        )
        entry = manager.apply()["sum_is_lost"]
        assert entry.matches == expected
        refused = ["the intermediate result of aten.add.Tensor has another user"]
        assert list(entry.refused) == ([] if expected else refused)


@pytest.mark.parametrize("residual", [(16,), ("T", 1), (1, 16)])
def test_another_residual_does_not_match(residual: tuple[Any, ...]) -> None:
    matches, refused = one_match(_norms, residual, H, (16,))
    assert (matches, refused) == (0, ["its condition does not hold"])


def test_a_number_for_a_residual_does_not_match() -> None:
    assert one_match(lambda x, w: _norms(1.0, x, w), H, (16,)) == (0, [])  # type: ignore[arg-type]


def test_a_weight_of_another_dtype_does_not_match() -> None:
    weight = torch.empty(16, dtype=torch.bfloat16)
    assert one_match(_norms, H, H, weight) == (0, ["its condition does not hold"])


def test_a_scaled_sum_does_not_match() -> None:
    def scaled(residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return OPS.rms_norm(torch.add(residual, x, alpha=2), weight, 1e-5)

    assert one_match(scaled, H, H, (16,)) == (0, [])


def test_a_write_between_the_parts_is_respected() -> None:
    def overwritten(residual: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = residual + x
        early = h * 2
        h.add_(1)
        return OPS.rms_norm(h, weight, 1e-5), early

    assert one_match(overwritten, H, H, (16,))[0] == 0

    def input_overwritten(residual: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = residual + x
        residual.mul_(2)
        return OPS.rms_norm(h, weight, 1e-5), h

    matches, refused = one_match(input_overwritten, H, H, (16,))
    assert (matches, refused) == (0, ["memory that it reads or returns is written in between"])


def test_writes_elsewhere_do_not_matter() -> None:
    def written_elsewhere(residual: Tensor, x: Tensor, other: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        other.mul_(2)
        h = residual + x
        other.add_(1)
        return OPS.rms_norm(h, weight, 1e-5), h

    assert one_match(written_elsewhere, H, H, H, (16,)) == (1, [])


def test_a_result_that_is_needed_before_the_inputs_are_there_does_not_match() -> None:
    def early(residual: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = residual + x
        made = (h * weight).sum(0)
        return OPS.rms_norm(h, made, 1e-5), h

    matches, refused = one_match(early, H, H, (16,))
    assert (matches, refused) == (0, ["a result is used before all inputs are there"])
