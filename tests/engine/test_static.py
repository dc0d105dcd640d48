"""The engine over static programs: the reference's tokens at every edge, and moves that carry bytes."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import compare_greedy, load_reference
from tiny import save_tiny

from piecework import LLM
from piecework.config import EngineConfig
from piecework.errors import ConfigError, RequestError
from piecework.explain.explain import explain
from piecework.kvcache import StaticKVCache
from piecework.runner.static import StaticShapeError, StaticSteps
from piecework.server.metrics import ServerMetrics

RNG = random.Random(7)
CHUNK, SIZES = 4, (8, 12, 24)
STATIC: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "kv_strategy": "static",
    "kv_capacities": ",".join(map(str, SIZES)),
    "chunk_size": CHUNK,
}
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
OPENVINO = pytest.param(
    "openvino:CPU",
    True,
    marks=pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino isn't installed"),
)


def prompt(length: int) -> list[int]:
    return [RNG.randrange(3, 320) for _ in range(length)]


def is_static(llm: LLM) -> bool:
    return isinstance(llm.service.runner.cache, StaticKVCache)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("static"), "llama", num_hidden_layers=2)


@torch.inference_mode()
def check_shapes(runner: Any) -> None:
    """A program takes tensors of its own shapes, and no others."""
    cache, steps, room = runner.cache, runner.graphs, SIZES[0]
    assert isinstance(steps, StaticSteps) and len(steps.programs) == 1 + len(SIZES)
    # OpenVINO's CPU has one model of decode, for all capacities; each one more would pack the weights again.
    models = len({id(program.piece) for program in steps.programs})
    assert models == (2 if runner.device.open_capacity else 4)
    past = {f"keys.{layer}": cache.keys(layer, 1, room) for layer in range(2)}
    past |= {f"values.{layer}": cache.values(layer, 1, room) for layer in range(2)}
    token = torch.zeros(1, dtype=torch.int64)
    hidden, keys, _ = steps.decode[room].run(token, token, past)
    assert hidden.shape[0] == 1 and keys[0].shape == (1, 2, 1, 16)
    with pytest.raises(StaticShapeError, match=r"keys.1 is \(1, 2, 4, 16\)"):
        steps.decode[room].run(token, token, {**past, "keys.1": cache.keys(1, 1, 4)})


@pytest.mark.parametrize(("device", "transposed"), [("sim", False), OPENVINO])
def test_tokens_at_every_edge_and_across_every_move(model: Path, device: str, transposed: bool) -> None:
    first, largest = SIZES[0], SIZES[-1]
    lengths = [1, CHUNK - 1, CHUNK, CHUNK + 1, first - 1, first, first + 1, largest - 1, largest]
    prompts = [prompt(n) for n in lengths]
    with LLM(str(model), device=device, kv_transpose_values=transposed, **STATIC) as llm:
        cache: Any = llm.service.runner.cache
        assert llm.service.max_model_len == largest + 1
        # All that fits, so that a short prompt goes through every capacity.
        outputs = [
            list(llm.generate(p, max_tokens=largest + 1 - len(p), **GREEDY)[0].token_ids) for p in prompts
        ]
        assert cache.moved_bytes["to_prefill.keys"] == 0
        for name in ("keys", "values"):
            assert cache.moved_bytes[f"to_decode.{name}"] > 0 and cache.moved_bytes[f"promotion.{name}"] > 0
        steps = llm.service.stats().steps_total
        for length, room in ((largest + 1, 1), (first, largest + 2 - first)):
            with pytest.raises(RequestError, match=rf"kv_capacities is {largest} tokens"):
                llm.generate(prompt(length), max_tokens=room, **GREEDY)
        # A chat goes on: from decode back to prefill, and what was computed is not computed again.
        turn = prompt(5)
        (answer,) = llm.generate(turn, max_tokens=4, **GREEDY)
        said = [*turn, *answer.token_ids]
        (again,) = llm.generate([*said, *turn], max_tokens=6, **GREEDY)
        assert again.usage.cached_tokens == len(said) - 1
        for name in ("keys", "values"):
            assert cache.moved_bytes[f"to_prefill.{name}"] > 0
        prompts += [turn, [*said, *turn]]
        outputs += [list(answer.token_ids), list(again.token_ids)]
        counters = llm.service.graph_counters()["body"]
        assert counters["whole_runs"] >= steps and counters["eager_runs"] == counters["recompiles"] == 0
        assert llm.service.runner.compilers == ("openvino" if transposed else "eager",)
        tail = cache.values(0, 1, cache.capacity(1)).narrow(cache.value_dim, len(said) + 10, 1)
        assert not tail.any()
        check_shapes(llm.service.runner)
        text = ServerMetrics(llm.service).text().decode()
        assert 'piecework_kv_moved_bytes_total{move="promotion",tensor="keys"}' in text
    found = compare_greedy(load_reference(model), prompts, outputs)
    assert found.wrong == [] and found.compared > 80


@pytest.mark.parametrize("device", ["sim", OPENVINO.values[0]])
@pytest.mark.parametrize("sizes", [(1,), (1, 2, 3), (1, 7), (5, 6)])
def test_tokens_with_odd_capacities(model: Path, device: str, sizes: tuple[int, ...]) -> None:
    """A capacity of 1, and those that no chunk divides."""
    if device != "sim":
        pytest.importorskip("openvino", reason="openvino isn't installed")
    largest = sizes[-1]
    prompts = [prompt(n) for n in range(1, largest + 1)]
    settings = {**STATIC, "kv_capacities": ",".join(map(str, sizes))}
    with LLM(str(model), device=device, kv_transpose_values=True, **settings) as llm:
        outputs = [
            list(llm.generate(p, max_tokens=largest + 1 - len(p), **GREEDY)[0].token_ids) for p in prompts
        ]
    found = compare_greedy(load_reference(model), prompts, outputs)
    assert found.wrong == [] and found.compared == sum(map(len, outputs)) == largest * (largest + 1) // 2


def test_requests_queue_for_slots(tmp_path: Path) -> None:
    """With windows, so that there are masks of two kinds."""
    folder = save_tiny(tmp_path, "qwen2", num_hidden_layers=2)
    prompts = [prompt(n) for n in (9, 3, 14, 6)]
    with LLM(str(folder), device="sim", kv_slots=2, **{**STATIC, "kv_capacities": "12,24"}) as llm:
        outputs = llm.generate(prompts, max_tokens=8, **GREEDY)
        stats = llm.service.stats()
        assert (stats.kv_pages_total, stats.kv_pages_used, stats.preemptions_total) == (2, 0, 0)
        # A chunk of a prompt and a token of another request ran in one step.
        assert llm.service.graph_counters()["body"]["whole_runs"] > stats.steps_total
    found = compare_greedy(load_reference(folder), prompts, [list(r.token_ids) for r in outputs])
    assert found.wrong == [] and found.compared == 32


def test_pages_take_over_from_a_static_device(model: Path) -> None:
    prompts = [prompt(10), prompt(5)]
    fault = "point=run,device=0,step=7,kind=error"
    with LLM(str(model), device="sim,cpu", inject_fault=fault, kv_slots=2, **STATIC) as llm:
        assert is_static(llm)
        outputs = llm.generate(prompts, max_tokens=10, **GREEDY)
        assert llm.service.device_name == "cpu" and not is_static(llm)
    found = compare_greedy(load_reference(model), prompts, [list(r.token_ids) for r in outputs])
    assert found.wrong == [] and found.compared == 20


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cpu"}, "kv_strategy='static'.* paged on cpu"),
        ({"kv_strategy": "paged"}, "kv_capacities='8,12,24'.* for kv_strategy=static only"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8'.* for kv_strategy=paged only"),
        ({"max_num_pages": 9}, "max_num_pages=9.* for kv_strategy=paged only"),
        ({"kv_capacities": "8,8"}, "kv_capacities='8,8'"),
        ({"kv_capacities": "8,512"}, "kv_capacities='8,512'.* at most 256 tokens"),
        ({"max_model_len": 40}, "at least 39 tokens for max_model_len=40"),
        ({"kv_cache_memory": 100}, "kv_slots=1.* fit into 100 bytes"),
        ({"workers": "process"}, "workers='process'"),
        ({"isolate": True, "device": "sim,cpu"}, "isolate=True.* false with kv_strategy=static"),
        ({"place": "head:cpu,0:cpu"}, "place='head:cpu,0:cpu'.* head with kv_strategy=static"),
        ({"compilation_config": {"decode_graph": "full"}}, "decode_graph='full'"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(
    model: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(model), **{"device": "sim", **STATIC, **settings})


def test_explain_refuses_it_by_name(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_strategy='static'.* paged: explain shows pieces"):
        explain(EngineConfig.from_flat({"model": str(model), "device": "sim", **STATIC}))
