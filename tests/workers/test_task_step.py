"""Steps of a model as tasks: the runner's own tokens, weights up once, one message a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from programs import random_model
from torch import Tensor
from worker_rig import recording_worker

from piecework.config import EngineConfig
from piecework.config.rings import RINGS
from piecework.devices import make_device
from piecework.engine.engine import Engine
from piecework.engine.outputs import Delta
from piecework.engine.request import Request
from piecework.kvcache import PagedKVCache
from piecework.profile import Profile
from piecework.runner.batch import BatchItem, Span
from piecework.runner.programs import Programs, layer_shapes, make_programs
from piecework.runner.recipe import make_recipe
from piecework.runner.runner import Runner
from piecework.runner.sampler import SamplingState
from piecework.sampling import SamplingParams
from piecework.workers.tasks.arguments import Allocate, TaskArgs
from piecework.workers.tasks.functions import Function
from piecework.workers.tasks.inline import inline
from piecework.workers.tasks.limits import CapacityError, Limits
from piecework.workers.tasks.nested import Nested
from piecework.workers.tasks.recording import Record
from piecework.workers.tasks.step import Pages, StepFunctions, TaskRunner
from piecework.workers.tasks.tags import Tag
from piecework.workers.tasks.worker import Worker

PAGES = Pages(40, 4)
GREEDY = SamplingParams(temperature=0.0)
F32 = torch.float32


def programs_of(name: str, tmp_path: Path) -> Programs:
    """A tiny model's programs on the CPU, with their own random weights."""
    config = EngineConfig.from_flat({"page_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64})
    model, device = random_model(name), make_device("cpu")
    recipe = make_recipe(config, device, model.config, model.dtype, 128)
    return make_programs(model, recipe, config, device, Profile(), tmp_path, 128, stored=False)


def task_runner(
    programs: Programs, children: int = 1, plans: bool = True, limits: Limits | None = None
) -> tuple[list[TaskRunner], Worker, Record]:
    """Runners over the recorded inline children of one worker of level 3."""
    functions = StepFunctions.of(programs)
    worker, record = recording_worker(3, children, (functions.body, functions.head), limits=limits)
    runners = [TaskRunner(worker, i, programs, functions, PAGES, plans=plans) for i in range(children)]
    return runners, worker, record


def decode(runner: Runner | TaskRunner, prompts: list[list[int]], steps: int) -> list[list[int]]:
    """Greedy tokens of prompts that run together: a prefill of all, then one token each per step."""
    pages = [list(range(1 + 8 * i, 9 + 8 * i)) for i in range(len(prompts))]
    tokens: list[list[int]] = [[] for _ in prompts]
    for step in range(steps):
        items = []
        for i, prompt in enumerate(prompts):
            start = len(prompt) + step - 1 if step else 0
            ids = tokens[i][-1:] if step else prompt
            held = pages[i][: -(-(start + len(ids)) // 4)]
            state = SamplingState(GREEDY, 0, step, prompt, tokens[i])
            items.append(BatchItem(ids, Span(start, len(ids)), held, state))
        for i, result in enumerate(runner.execute(items)):
            assert result.token_id is not None
            tokens[i].append(result.token_id)
    return tokens


PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3, 4], [100, 7, 19, 20, 21]]


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_steps_as_tasks_give_the_tokens_of_the_runner(name: str, tmp_path: Path) -> None:
    programs = programs_of(name, tmp_path)
    cache = PagedKVCache(layer_shapes(programs.model), 40, 4, F32, programs.device)
    wanted = decode(Runner(programs, cache, Profile()), PROMPTS, 10)
    (graph,), worker, record = task_runner(programs, plans=False)
    assert decode(graph, PROMPTS, 10) == wanted
    assert (graph.steps_as_graph, graph.steps_planned) == (10, 0)
    weights = {t.data_ptr() for p in (programs.body, programs.head) for t in p.weights.values()}
    worker.close()
    (planned,), worker, record = task_runner(programs)
    assert decode(planned, PROMPTS, 10) == wanted, "the dynamic graph is the plan's oracle"
    assert planned.steps_planned >= 6 and planned.steps_planned + planned.steps_as_graph == 10
    record.operations.clear()
    planned_before = planned.steps_planned
    assert decode(planned, PROMPTS, 10) == wanted
    assert planned.steps_planned == planned_before + 9, "only the prefill is a graph now"
    assert record.names()[-2:] == ["run", "copy_from"], "a step is one message and its result"
    uploads = [name for name in record.names() if name == "copy_to"]
    assert len(uploads) < 10 < len(weights), "no weight went up again"
    worker.close()


def test_a_step_beyond_a_ring_is_a_typed_error_and_the_next_step_runs(tmp_path: Path) -> None:
    programs = programs_of("llama", tmp_path)
    hidden = programs.model.config.hidden_size * 4  # bytes of a token's state in float32
    (tasks,), worker, _ = task_runner(programs, limits=Limits.parse(8 * hidden, 100, 100, timeout=0.05))
    wanted = decode(tasks, PROMPTS[1:2], 4)
    with pytest.raises(CapacityError, match="--ring-heap") as caught:
        decode(tasks, PROMPTS, 1)  # 14 tokens
    error = caught.value
    assert (error.resource, error.ring, error.limit, error.wanted) == ("heap", 0, 8 * hidden, 14 * hidden)
    assert decode(tasks, PROMPTS[1:2], 4) == wanted
    worker.close()
    assert (Limits().heap, Limits().task_window) == ((4 * 2**30,) * RINGS, (2**20,) * RINGS)
    (roomy,), worker, _ = task_runner(programs)
    decode(roomy, [[7] * 30], 1)
    assert worker.high_water["heap"][0] == 30 * hidden
    worker.close()


def test_two_children_run_two_models_by_data_parallelism(tmp_path: Path) -> None:
    programs = programs_of("llama", tmp_path)
    (first, second), worker, record = task_runner(programs, children=2)
    wanted = decode(first, PROMPTS, 8)
    assert decode(second, PROMPTS[::-1], 8) == wanted[::-1]
    assert {who for who, name, _ in record.operations if name == "run"} == {"w0", "w1"}
    worker.close()


def test_an_engine_runs_on_tasks(tmp_path: Path) -> None:
    programs = programs_of("llama", tmp_path)
    config = programs.config
    cache = PagedKVCache(layer_shapes(programs.model), 40, 4, F32, programs.device)
    (tasks,), worker, _ = task_runner(programs)
    found = []
    for runner in (Runner(programs, cache, Profile()), tasks):
        engine = Engine(runner, config)  # type: ignore[arg-type]
        tokens: dict[str, list[int]] = {}
        for i, prompt in enumerate(PROMPTS):
            name = str(i)
            tokens[name] = []

            def hear(delta: Delta, seen: list[int] = tokens[name]) -> None:
                seen.extend(delta.token_ids)

            params = SamplingParams(temperature=0.0, max_tokens=6)
            engine.add(Request(name, 0, prompt, params, 0, 6, frozenset(), hear, None))
        while engine.has_work:
            engine.step()
        found.append(tokens)
    assert found[0] == found[1]
    assert all(len(one) == 6 for one in found[1].values())
    worker.close()


def test_a_level_4_worker_runs_steps_on_two_workers_of_level_3(tmp_path: Path) -> None:
    programs = programs_of("llama", tmp_path)
    functions = StepFunctions.of(programs)

    def complete(worker: Worker, prompt: Tensor, tokens: Tensor) -> None:
        runner = TaskRunner(worker, 0, programs, functions, PAGES)
        tokens.copy_(torch.tensor(decode(runner, [prompt.tolist()], len(tokens))[0]))

    function = Function.of(complete, "a model", skip=1, prompt=Tag.INPUT, tokens=Tag.OUTPUT)
    nodes = [Worker(3, [inline(name=n)], functions=[functions.body, functions.head]) for n in ("a0", "b0")]
    children = [Nested(node, name) for node, name in zip(nodes, "ab", strict=True)]
    found = [torch.empty(8, dtype=torch.int64) for _ in nodes]
    with Worker(4, children, functions=[function]) as top, top.orchestrate():
        for number, prompt in enumerate(PROMPTS[:2]):
            args = TaskArgs(prompt=top.defer(torch.tensor(prompt)), tokens=Allocate((8,), torch.int64))
            top.copy_from(top.submit_next_level(function, args, number)["tokens"], found[number])
    cache = PagedKVCache(layer_shapes(programs.model), 40, 4, F32, programs.device)
    runner = Runner(programs, cache, Profile())
    assert [one.tolist() for one in found] == [decode(runner, [p], 8)[0] for p in PROMPTS[:2]]
