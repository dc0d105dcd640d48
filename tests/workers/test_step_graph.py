"""The rings of the engine's step: set by flag, key and keyword, and a step beyond one is refused alone."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from tiny import save_tiny

from piecework import LLM
from piecework.cli.flags import config_from_args
from piecework.cli.main import COMMANDS
from piecework.config import EngineConfig
from piecework.engine.engine import Engine
from piecework.engine.outputs import Delta
from piecework.engine.request import Request
from piecework.errors import ConfigError
from piecework.runner.batch import BatchItem, ItemResult, Span
from piecework.runner.sampler import SamplingState
from piecework.sampling import SamplingParams
from piecework.server.worker_metrics import worker_metrics
from piecework.workers.serving.step_graph import StepGraph
from piecework.workers.tasks.limits import KNOBS, CapacityError, Limits

F32 = torch.float32
HIDDEN, VOCAB = 8, 50
GREEDY = SamplingParams(temperature=0.0)


def item(tokens: int, targets: int = 0, draws: bool = True) -> BatchItem:
    """A prompt of so many tokens."""
    state = SamplingState(GREEDY, 0, 0, (), ()) if draws else None
    return BatchItem([1] * tokens, Span(0, tokens), [1], state, [1] * targets)


def graph_of(heap: Any = "4GiB", tasks: Any = 100, edges: Any = 100) -> StepGraph:
    return StepGraph(Limits.parse(heap, tasks, edges, timeout=0.0), HIDDEN, VOCAB, F32)


def test_a_step_takes_what_its_tasks_put_out() -> None:
    graph = graph_of()
    graph.admit([item(5), item(2), item(9, draws=False)])
    most = {name: figures["high_water"] for name, figures in graph.rings().items()}
    assert most["heap"] == [(16 * HIDDEN + 2 * VOCAB) * 4, 0, 0, 0]
    assert most["task-window"] == [5, 0, 0, 0], "the message, body, head, draw, the tokens"
    assert most["dep-pool"][0] >= 4, "each of them needs what the one before made"
    graph.admit([item(200, targets=199)])
    assert graph.rings()["heap"]["high_water"][:2] == [(200 * HIDDEN + VOCAB) * 4, 128 * VOCAB * 4]


@pytest.mark.parametrize(
    ("graph", "resource", "ring", "used", "limit"),
    [
        (graph_of(heap=16 * HIDDEN * 4 - 1), "heap", 0, 0, 16 * HIDDEN * 4 - 1),
        (graph_of(heap=16 * HIDDEN * 4), "heap", 0, 16 * HIDDEN * 4, 16 * HIDDEN * 4),
        (graph_of(tasks=3), "task-window", 0, 3, 3),
        (graph_of(edges="1,9,9,9"), "dep-pool", 0, 1, 1),
        (graph_of(heap=["1M", "1K", "1M", "1M"]), "heap", 1, 0, 1024),
    ],
    ids=lambda value: None if isinstance(value, StepGraph) else str(value),
)
def test_a_step_beyond_a_ring_is_a_typed_error(
    graph: StepGraph, resource: str, ring: int, used: int, limit: int
) -> None:
    for _ in range(2):  # a refused shape is not admitted the second time
        with pytest.raises(CapacityError) as caught:
            graph.admit([item(16, targets=15 if ring else 0)])
        error = caught.value
        assert (error.resource, error.ring, error.used, error.limit) == (resource, ring, used, limit)
        assert error.knob == KNOBS[resource] and f"raise {error.knob}" in str(error)
    graph.admit([item(1, draws=False)])


class OneToken:
    """A runner that gives token 7 to whoever draws, and notes how many tokens steps had."""

    def __init__(self) -> None:
        from piecework.profile import Profile

        self.profile = Profile()
        self.cache = type("Cache", (), {"num_pages": 50, "page_size": 4})()
        self.device = type("Device", (), {"name": "cpu"})()
        self.steps: list[int] = []

    def execute(self, items: list[BatchItem]) -> list[ItemResult]:
        self.steps.append(sum(len(one.token_ids) for one in items))
        return [ItemResult(token_id=7) if one.sampling else ItemResult() for one in items]


def test_the_engine_raises_it_and_runs_the_next_step() -> None:
    runner, heard = OneToken(), {}
    config = EngineConfig.from_flat({"page_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64})
    room = 10 * HIDDEN * 4 + VOCAB * 4
    engine = Engine(runner, config, graph=graph_of(heap=room))  # type: ignore[arg-type]

    def add(name: str, tokens: int) -> None:
        def hear(delta: Delta) -> None:
            if delta.finish_reason:
                heard[name] = delta

        params = SamplingParams(temperature=0.0, max_tokens=2)
        engine.add(Request(name, 0, [1] * tokens, params, 0, 2, frozenset(), hear, None))

    add("long", 30)
    with pytest.raises(CapacityError, match=f"the limit is {room}; raise --ring-heap"):
        engine.step()
    assert runner.steps == [] and "raise --ring-heap" in str(heard["long"].error)
    add("short", 10)
    while engine.has_work:
        engine.step()
    assert heard["short"].finish_reason == "length" and runner.steps == [10, 1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3", tokenizer=True))


@pytest.mark.parametrize("workers", ["inline", "process"])
def test_a_ring_too_small_for_a_step_of_the_real_engine(folder: str, workers: str) -> None:
    settings = {"dtype": "float32", "threads": 1, "num_pages": 200, "workers": workers}
    with LLM(folder, **settings) as llm:
        config = llm.service.model_config
        expected = llm.generate([[5, 6, 7]], temperature=0.0, max_tokens=5, ignore_eos=True)[0].token_ids
    room = 20 * config.hidden_size * 4 + config.vocab_size * 4
    with LLM(folder, ring_heap=room, **settings) as llm:
        (before,) = llm.service.workers()
        for _ in range(7):  # more than the failures in a row that end an engine
            (refused,) = llm.generate([[9] * 40], temperature=0.0, max_tokens=5)
            assert refused.finish_reason == "error"
            wanted = f"heap of ring 0: 0 used and {40 * config.hidden_size * 4} more wanted"
            assert f"{wanted}, the limit is {room}; raise --ring-heap" in str(refused.error)
        (found,) = llm.generate([[5, 6, 7]], temperature=0.0, max_tokens=5, ignore_eos=True)
        assert found.token_ids == expected
        (after,) = llm.service.workers()
        assert (after.pid, after.generation, after.status) == (before.pid, 0, "ready")
        assert llm.service.health()["status"] == "ok"
        assert after.rings["heap"]["limit"] == [room] * 4
        assert 0 < after.rings["heap"]["high_water"][0] <= room
        registry = CollectorRegistry()
        registry.collect = lambda: worker_metrics([after])  # type: ignore[method-assign]
        text = generate_latest(registry).decode()
        labels = f'{{resource="heap",ring="0",worker="{after.name}"}}'
        assert f"piecework_worker_ring_limit{labels} {float(room)}" in text
        assert f"piecework_worker_ring_high_water{labels}" in text


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_each_knob_that_an_error_names_is_a_flag(command: str, tmp_path: Path) -> None:
    parser = import_module(COMMANDS[command][0]).make_parser()
    words = [word for knob in KNOBS.values() for word in (knob, "64M,9,9,9")]
    config = config_from_args(EngineConfig, parser.parse_args(words)).worker
    assert (config.ring_heap, config.ring_task_window, config.ring_dep_pool) == ("64M,9,9,9",) * 3
    file = tmp_path / "settings.yaml"
    file.write_text("worker:\n  ring-heap: [64M, 8M, 4M, 1M]\n  ring_task_window: 512\nring-dep-pool: '7'\n")
    read = config_from_args(EngineConfig, parser.parse_args(["--config", str(file)])).worker
    limits = Limits.parse(read.ring_heap, read.ring_task_window, read.ring_dep_pool)
    assert limits.heap == (64 * 2**20, 8 * 2**20, 4 * 2**20, 2**20)
    assert (limits.task_window, limits.dep_pool) == ((512,) * 4, (7,) * 4)


def test_the_defaults_are_those_of_limits_and_pass_a_large_prefill() -> None:
    own = EngineConfig().worker
    assert Limits.parse(own.ring_heap, own.ring_task_window, own.ring_dep_pool) == Limits()
    graph = StepGraph(Limits(), 5120, 151936, torch.bfloat16)
    graph.admit([item(512, targets=511)] * 4 + [item(1)] * 60)


@pytest.mark.parametrize("name", ["ring_heap", "ring_task_window", "ring_dep_pool"])
@pytest.mark.parametrize(
    "value", ["", "x", "1,2", "0", "1,2,3,0", 0, -1, [1, 2], [], [0, 1, 1, 1], True, 1.5]
)
def test_a_limit_that_can_not_be_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_flat({name: value})
    assert caught.value.field == name
