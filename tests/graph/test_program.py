"""A program gives what the model gives, and its pieces are as many as promised."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dense_kv import DenseKV
from programs import inputs_of, options, program_of, random_model

from piecework.graph.build import build_head_program, build_program
from piecework.graph.program import HoleCall, PieceCall
from piecework.models.decoder import CausalLM

MODELS = ("llama", "qwen3")
COUNTS = (1, 2, 7, 33, 451)


@pytest.mark.parametrize("layers", [2, 8, 30])
@pytest.mark.parametrize("name", MODELS)
def test_pieces_fold_to_three(name: str, layers: int) -> None:
    program, made = program_of(random_model(name, layers))
    counted = made.counters.snapshot()
    assert (counted["traces"], counted["pieces"], counted["holes"], counted["distinct"]) == (
        1,
        layers + 1,
        layers,
        3,
    )
    assert (program.num_pieces, program.num_holes, program.num_distinct) == (layers + 1, layers, 3)
    assert program.graphs_traced == 1 and counted["recompiles"] == 0
    assert [s.args[4] for s in program.steps if isinstance(s, HoleCall)] == list(range(layers))


def _eps(model: CausalLM) -> None:
    model.model.layers[3].input_layernorm.eps = 1e-3


def _qkv_bias(model: CausalLM) -> None:
    projection = model.model.layers[3].self_attn.qkv_proj
    projection.bias = torch.nn.Parameter(torch.zeros(projection.weight.shape[0]), requires_grad=False)


def _o_bias(model: CausalLM) -> None:
    projection = model.model.layers[3].self_attn.o_proj
    projection.bias = torch.nn.Parameter(torch.zeros(projection.weight.shape[0]), requires_grad=False)


def _activation(model: CausalLM) -> None:
    mlp = model.model.layers[3].mlp

    def forward(x: torch.Tensor, num_valid_rows: Any = None) -> torch.Tensor:
        gate, up = mlp.gate_up_proj(x).split(mlp.gate_up_proj.sizes, -1)
        result: torch.Tensor = mlp.down_proj(torch.nn.functional.gelu(gate) * up)
        return result

    mlp.forward = forward


@pytest.mark.parametrize("change", [_eps, _qkv_bias, _o_bias, _activation])
def test_a_layer_that_differs_adds_one_distinct_piece(change: Any) -> None:
    model = random_model("llama", 8)
    change(model)
    program, _ = program_of(model)
    assert program.num_distinct == 4
    kinds = [s.distinct for s in program.steps if isinstance(s, PieceCall)]
    # What stands before a layer's attention is in the piece before, what stands after in the one after.
    odd = 3 if change in (_eps, _qkv_bias) else 4
    assert [i for i, kind in enumerate(kinds) if kinds.count(kind) == 1] == [0, odd, 8]


def test_moe_flags_make_their_own_pieces() -> None:
    model = random_model("qwen3_moe", 8)
    assert program_of(model)[0].num_distinct == 3
    model.model.layers[3].mlp.top_k = 3
    assert program_of(model)[0].num_distinct == 4
    model.model.layers[5].mlp.renormalize = not model.model.layers[5].mlp.renormalize
    assert program_of(model)[0].num_distinct == 5
    mixed = random_model("qwen3_moe", 8, mlp_only_layers=[2, 6])
    assert program_of(mixed)[0].num_distinct == 4


@pytest.mark.parametrize("name", [*MODELS, "qwen3_moe", "qwen2", "mistral"])
def test_eager_pieces_equal_the_model(name: str) -> None:
    model = random_model(name, 3)
    program, made = program_of(model)
    with torch.inference_mode():
        for count in COUNTS:
            inputs = inputs_of(model, count)
            torch.testing.assert_close(program.run(inputs), model(*inputs), rtol=1e-5, atol=1e-5)
    assert made.counters.recompiles == 0


def test_fill_gets_each_layer_once_and_its_result_counts() -> None:
    model = random_model("llama", 4)
    program, _ = program_of(model)
    cache, oracle = DenseKV(model.attention_specs), DenseKV(model.attention_specs)
    layers: list[int] = []

    def fill(layer: int, q: Any, k: Any, v: Any, out: Any) -> None:
        layers.append(layer)
        cache(layer, q, k, v, out)

    model.bind_attention(oracle)
    ids = inputs_of(model, 12)[0]
    with torch.inference_mode():
        for start, stop in ((0, 5), (5, 6), (6, 7), (7, 12)):
            inputs = [ids[start:stop], torch.arange(start, stop)]
            got, wanted = program.run(inputs, fill), model(*inputs)
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert layers == list(range(4)) * 4


def test_trace_ignores_what_is_bound() -> None:
    model = random_model("llama")
    model.bind_attention(lambda *_: pytest.fail("the bound callable ran in a trace"))
    assert program_of(model)[0].num_holes == 2


def test_weights_are_bound_by_reference() -> None:
    model = random_model("llama", 3)
    program, _ = program_of(model)
    parameters = {name: p for name, p in model.named_parameters() if name != "lm_head.weight"}
    bound = {b.name: b.tensor for b in program.bindings if b.kind == "weight"}
    assert bound.pop("model.rotary.cos_sin") is model.model.rotary.cos_sin
    assert bound.keys() == parameters.keys()
    assert all(bound[name] is parameters[name] for name in bound)
    inputs = inputs_of(model, 4)
    before = program.run(inputs)
    model.model.norm.weight.mul_(2)
    torch.testing.assert_close(program.run(inputs), before * 2)


def test_values_are_freed_when_no_later_step_needs_them() -> None:
    program, _ = program_of(random_model("llama", 3))
    env = program.environment(inputs_of(random_model("llama", 3), 5))
    alive = []
    for step in program.steps:
        if isinstance(step, PieceCall):
            results = program.pieces[step.distinct](step.gather(env))
            for slot, tensor in zip(step.outputs, results, strict=True):
                env[slot] = tensor
        else:
            step.run(env, None)
        for slot in step.frees:
            env[slot] = None
        alive.append(sum(t is not None for t in env[len(program.bindings) :]))
    # After a piece: the residual, q, k, v and out; after a hole: the residual and out.
    assert alive == [5, 2, 5, 2, 5, 2, 1]


def test_head_is_its_own_program() -> None:
    for name in ("llama", "qwen3"):
        model = random_model(name)
        made = options()
        body, head = build_program(model, options()), build_head_program(model, made)
        assert (head.num_pieces, head.num_holes, made.counters.pieces) == (1, 0, 1)
        assert "lm_head.weight" not in [b.name for b in body.bindings]
        for rows in (1, 2, 9):
            hidden = torch.randn(rows, model.config.hidden_size)
            torch.testing.assert_close(head.run([hidden]), model.head(hidden))


def test_wrong_number_of_inputs_is_refused() -> None:
    model = random_model("qwen3_moe")
    program, _ = program_of(model)
    with pytest.raises(ValueError, match="input_ids, positions, num_valid_rows"):
        program.run(inputs_of(model, 3)[:2])


def test_more_tokens_than_the_program_is_made_for_are_refused() -> None:
    model, made = random_model("llama"), options()
    made.max_tokens = 16
    program = build_program(model, made)
    program.run(inputs_of(model, 16))
    with pytest.raises(ValueError, match="17 tokens; the program is made for 16 at most"):
        program.run(inputs_of(model, 17))


def test_rows_past_num_valid_rows_reach_no_expert() -> None:
    model = random_model("qwen3_moe", 2)
    program, _ = program_of(model)
    ids, positions, _ = inputs_of(model, 6)
    short = program.run([ids[:4], positions[:4], torch.tensor([4])])
    padded = program.run([ids, positions, torch.tensor([4])])
    torch.testing.assert_close(padded[:4], short, rtol=1e-5, atol=1e-5)
