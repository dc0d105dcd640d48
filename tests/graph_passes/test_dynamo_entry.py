"""`torch.compile(model, backend="piecework")` on models of transformers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pass_graphs import count
from tiny import tiny_model
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

from piecework.compilation import CompilationConfig
from piecework.graph.dynamo_entry import Backend
from piecework.graph.program import Program

NORMS = {"llama": 2, "qwen3": 4}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def ids(batch: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 300, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def named_ops_per_piece(program: Program, op: str) -> list[int]:
    """How often the op is in each piece of the program, in the order in which they run."""
    kinds = [count(graph, op) for graph in program.distinct_graphs]
    return [kinds[step.distinct] for step in program.steps if hasattr(step, "distinct")]


def check_named_ops(program: Program, layers: int, norms: int) -> None:
    assert named_ops_per_piece(program, "piecework::rotary") == [1] * layers + [0]
    assert named_ops_per_piece(program, "piecework::silu_and_mul") == [0] + [1] * layers
    # The norm before attention, which has no sum before it in the first layer, and those of the heads.
    assert named_ops_per_piece(program, "piecework::rms_norm") == [norms - 1] + [norms - 2] * (layers - 1) + [
        0
    ]
    # Behind attention that of the MLP, and then that of the next layer.
    assert named_ops_per_piece(program, "piecework::add_rms_norm") == [0] + [2] * layers
    assert named_ops_per_piece(program, "piecework::linear") == [3] + [7] * (layers - 1) + [5]
    for op in ("aten::rsqrt", "aten::silu", "aten::neg", "aten::linear"):
        assert sum(named_ops_per_piece(program, op)) == 0, op


@pytest.mark.slow
@pytest.mark.parametrize("layers", [2, 6])
@pytest.mark.parametrize("name", NORMS)
def test_a_model_of_transformers_runs_in_pieces(name: str, layers: int) -> None:
    model = tiny_model(name, num_hidden_layers=layers)
    backend = Backend(CompilationConfig(verify_passes=True, strict=True))
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    # The second shape makes both sizes symbolic, the third must not compile again.
    for shape in ((2, 7), (3, 12), (4, 21)):
        logits = compiled(ids(*shape)).logits
        torch.testing.assert_close(logits, model(ids(*shape)).logits, rtol=0, atol=1e-4)
    assert len(backend.programs) == 2
    for program, report in zip(backend.programs, backend.reports, strict=True):
        assert (program.num_pieces, program.num_holes, program.num_distinct) == (layers + 1, layers, 3)
        check_named_ops(program, layers, NORMS[name])
        assert report.matches["raise_rotary"] == report.matches["raise_silu_and_mul"] == layers
        assert report.matches["raise_rms_norm"] == NORMS[name] * layers + 1
    assert (backend.counters.traces, backend.counters.pieces) == (2, 2 * (layers + 1))


class SmallAttention(nn.Module):
    """One layer's worth: norm, projection, attention, projection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8, eps=1e-6)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_by_its_name(caplog: pytest.LogCaptureFixture) -> None:
    assert "piecework" in torch._dynamo.list_backends()
    model = SmallAttention().requires_grad_(False)
    x = torch.randn(1, 5, 8)
    with caplog.at_level(logging.INFO, "piecework.dynamo"):
        y = torch.compile(model, backend="piecework", options={"strict": True})(x)
    torch.testing.assert_close(y, model(x))
    (message,) = [r.getMessage() for r in caplog.records if r.name == "piecework.dynamo"]
    assert (
        message == "2 pieces (2 distinct), 1 holes; passes: canonicalise 2, raise_rms_norm 1, raise_linear 2"
    )
    with pytest.raises(BackendCompilerFailed, match=r"compilation_config.nope=1 is not allowed: one of"):
        torch.compile(model, backend="piecework", options={"nope": 1})(x)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_models_of_transformers_by_its_name(name: str) -> None:
    model = tiny_model(name)
    logits = torch.compile(model, backend="piecework", options={"strict": True})(ids(1, 9)).logits
    torch.testing.assert_close(logits, model(ids(1, 9)).logits, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_one_token_and_one_sequence() -> None:
    model = tiny_model("qwen3", num_hidden_layers=2)
    compiled = torch.compile(model, backend=Backend(CompilationConfig(strict=True)))
    for shape in ((1, 1), (1, 5), (5, 1), (1, 1)):
        torch.testing.assert_close(compiled(ids(*shape)).logits, model(ids(*shape)).logits, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_a_cache_that_is_written_in_place() -> None:
    from transformers import StaticCache

    model = tiny_model("qwen3", num_hidden_layers=2)
    compiled = torch.compile(model, backend=Backend(CompilationConfig(verify_passes=True, strict=True)))

    def run(call: Callable[..., Any]) -> Tensor:
        cache = StaticCache(config=model.config, max_cache_len=32)
        steps = [ids(2, 7), ids(2, 1, 1), ids(2, 1, 2)]
        return torch.cat([call(step, past_key_values=cache).logits for step in steps], 1)

    torch.testing.assert_close(run(compiled), run(model), rtol=0, atol=1e-4)


@pytest.mark.slow
def test_padding_and_windows_give_a_mask() -> None:
    model = tiny_model("mistral", num_hidden_layers=2)
    backend = Backend(CompilationConfig(verify_passes=True, strict=True))
    compiled = torch.compile(model, backend=backend)
    for tokens in (12, 19):
        mask = torch.ones(2, tokens, dtype=torch.int64)
        mask[1, :3] = 0
        expected = model(ids(2, tokens), attention_mask=mask).logits
        logits = compiled(ids(2, tokens), attention_mask=mask).logits
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    assert [p.num_distinct for p in backend.programs] == [3, 3]


@pytest.mark.slow
def test_16_bits_stay_within_what_the_passes_declare() -> None:
    model = tiny_model("qwen3", num_hidden_layers=2).to(torch.bfloat16)
    backend = Backend(CompilationConfig(verify_passes=True, strict=True))
    logits = torch.compile(model, backend=backend)(ids(2, 9)).logits.float()
    check_named_ops(backend.programs[0], 2, 4)
    expected = model(ids(2, 9)).logits.float()
    error = (logits - expected).square().mean().sqrt() / (expected.max() - expected.min())
    assert error < 0.01
    assert "raise_rotary" in backend.reports[0].not_bitwise


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [r for r in caplog.records if r.name == "piecework.dynamo" and r.levelname == "WARNING"]
    return [r.getMessage() for r in found]


def test_with_gradients_torch_runs_it_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    layer = nn.Linear(4, 4)
    with torch.enable_grad():
        y = torch.compile(layer, backend=Backend())(torch.ones(2, 4))
        y.sum().backward()
    assert layer.weight.grad is not None
    (message,) = warnings(caplog)
    assert "pieces give no gradients; call the model under torch.no_grad()" in message
    torch._dynamo.reset()
    strict = Backend(CompilationConfig(strict=True))
    with torch.enable_grad(), pytest.raises(BackendCompilerFailed, match="pieces give no gradients"):
        torch.compile(layer, backend=strict)(torch.ones(2, 4))


@pytest.mark.slow
def test_numbers_that_became_inputs_are_refused_with_the_way_out(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama", num_hidden_layers=2)
    expected = model(ids(2, 7)).logits
    backend = Backend()
    logits = torch.compile(model, backend=backend, dynamic=True)(ids(2, 7)).logits
    torch.testing.assert_close(logits, expected)
    assert backend.programs == []
    (message,) = warnings(caplog)
    assert "compile without dynamic=True" in message
    torch._dynamo.reset()
    with torch._dynamo.config.patch(specialize_float=True):
        logits = torch.compile(model, backend=backend, dynamic=True)(ids(2, 7)).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    assert backend.programs[0].num_distinct == 3


def test_a_model_without_attention_is_one_piece() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 4)).requires_grad_(False)
    backend = Backend(CompilationConfig(strict=True))
    x = torch.randn(3, 4)
    torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    assert (backend.programs[0].num_pieces, backend.programs[0].num_holes) == (1, 0)


def test_passes_can_be_chosen_and_disabled() -> None:
    model = nn.Sequential(nn.RMSNorm(4, eps=1e-6), nn.Linear(4, 4)).requires_grad_(False)
    x = torch.randn(3, 4)
    config = CompilationConfig(passes=("raise_rms_norm", "raise_linear"), disable_passes=("raise_linear",))
    backend = Backend(config)
    torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    assert [p.status for p in backend.reports[0].passes[1:]] == ["applied", "disabled"]
    assert named_ops_per_piece(backend.programs[0], "piecework::rms_norm") == [1]
    assert named_ops_per_piece(backend.programs[0], "piecework::linear") == [0]
    unknown = Backend(CompilationConfig(passes=("raise_all",)))
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match="passes='raise_all' is not allowed"):
        torch.compile(model, backend=unknown)(x)


def test_other_holes_can_be_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).requires_grad_(False)
    backend = Backend(CompilationConfig(splitting_ops=("aten::relu",), strict=True))
    x = torch.randn(3, 4)
    torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    assert (backend.programs[0].num_pieces, backend.programs[0].num_holes) == (2, 1)


def test_a_number_known_at_run_time_only_is_refused() -> None:
    def fn(x: Tensor, n: Tensor) -> Tensor:
        return x * n.item()

    backend = Backend(CompilationConfig(strict=True))
    scalars = torch._dynamo.config.patch(capture_scalar_outputs=True)
    with scalars, pytest.raises(BackendCompilerFailed, match="cannot be traced"):
        torch.compile(fn, backend=backend)(torch.ones(3), torch.tensor(2.5))
    assert backend.programs == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_pieces_compiled_by_inductor(name: str) -> None:
    model = tiny_model(name, num_hidden_layers=3)
    backend = Backend(CompilationConfig(compiler="inductor", strict=True))
    compiled = torch.compile(model, backend=backend)
    for shape in ((2, 7), (3, 12), (4, 21)):
        logits = compiled(ids(*shape)).logits
        torch.testing.assert_close(logits, model(ids(*shape)).logits, rtol=0, atol=1e-4)
    assert [p.num_distinct for p in backend.programs] == [3, 3]
    assert backend.counters.compile_failures == 0
