"""A model divided between processes: the same tokens, one death for all, and what is refused."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from shards import SETTINGS, all_end, check_ranks
from tiny import PIECEWISE, save_tiny

from piecework import LLM
from piecework.compilation import CompilationConfig
from piecework.config import EngineConfig
from piecework.devices import make_device
from piecework.errors import ConfigError, ModelError, PieceworkError
from piecework.models.shard import Shard
from piecework.ops import get
from piecework.runner.ranks import collectives_of, fit_collectives
from piecework.sampling import SamplingParams
from piecework.weights.source import resolve
from piecework.workers.serving.ranks import rank_config

LIMIT = 300  # seconds, for a model to be loaded again on a machine that has other things to do


def settings(**changes):
    return EngineConfig.from_flat({"tensor_parallel_size": 2, **changes})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_of_a_llama(tmp_path):
    check_ranks(str(save_tiny(tmp_path, "llama")), 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ranks_of_experts_with_graphs(tmp_path):
    folder = str(save_tiny(tmp_path, "qwen3_moe"))
    check_ranks(folder, 2, device="sim", compilation_config=PIECEWISE)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_death_of_a_rank_is_one_of_all_and_they_come_back(tmp_path):
    with LLM(str(save_tiny(tmp_path, "llama")), tensor_parallel_size=2, **SETTINGS) as llm:
        service = llm.service
        (before,) = service.workers()
        pids = (before.pid, *before.ranks)
        ended, found, killed = threading.Event(), [], []

        def listen(delta):
            if not killed:
                killed.append(pids[1])
                os.kill(killed[0], signal.SIGKILL)
            if delta.finish_reason is not None:
                found.append((delta.finish_reason, delta.error))
                ended.set()

        params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
        service.submit([5, 6, 7], params, listener=listen)
        assert ended.wait(LIMIT)
        ((reason, error),) = found
        assert reason == "error" and "SIGKILL" in error and f"process {killed[0]}" in error
        (result,) = llm.generate([5, 6, 7], max_tokens=3, ignore_eos=True)
        assert result.finish_reason == "length"
        (after,) = service.workers()
        assert after.generation > before.generation and not set(pids) & {after.pid, *after.ranks}
        os.kill(after.pid, signal.SIGKILL)  # rank 0, without which the others are orphans
        assert all_end((after.pid, *after.ranks))
    assert all_end(pids)


def test_what_is_refused_before_anything_is_started(tmp_path):
    folder = str(save_tiny(tmp_path, "llama"))
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=3 .* 1, 2, 4, .* 4 heads and 2 kv heads"):
        LLM(folder, tensor_parallel_size=3)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 .* workers=inline"):
        LLM(folder, tensor_parallel_size=2, workers="inline")
    with pytest.raises(ConfigError, match="device='openvino'"):
        LLM(folder, tensor_parallel_size=2, device="openvino")


def test_graphs_are_cut_at_sums_where_they_cannot_hold_them():
    sim = make_device("sim")
    fitted = fit_collectives(settings(), sim).compilation_config
    assert fitted.cuts == ("piecework::attention", "piecework::all_reduce")
    assert fitted.decode_graph == "piecewise"
    with pytest.raises(ConfigError, match=r"decode_graph='full' .* sim can't hold sums"):
        fit_collectives(settings(compilation_config={"decode_graph": "full"}), sim)
    whole = {"compiler": "dynamo:eager", "splitting_ops": []}
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 .* whole program"):
        fit_collectives(settings(compilation_config=whole), sim)
    sim.captures_collectives = True
    assert fit_collectives(settings(), sim).compilation_config == CompilationConfig()


def test_ranks_share_cores_or_have_a_device_each(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)), raising=False)
    assert rank_config(settings(), "cpu", Shard(1, 2)).device.threads == 3
    assert rank_config(settings(threads=5), "cpu", Shard(1, 2)).device.threads == 5
    assert rank_config(settings(), "sim", Shard(1, 64)).device.threads == 1
    several = settings(device="cuda:2,cpu")
    assert rank_config(several, "cuda:2", Shard(3, 4)).device.device == "cuda:5,cpu"
    assert rank_config(settings(device="npu"), "npu", Shard(0, 4)).device.device == "npu:0"
    assert [collectives_of(name) for name in ("cpu", "sim:host", "cuda", "npu:1")] == [
        "gloo",
        "gloo",
        "nccl",
        "hccl",
    ]


def test_a_sum_outside_a_group_is_an_error():
    import torch

    with pytest.raises(PieceworkError, match="no rank"):
        get("all_reduce").overload(torch.ones(2))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_default_model_in_three():
    try:
        resolve("smollm2-135m")
    except ModelError as error:
        pytest.skip(f"the default model can't be had here: {error}")
    prompts = [[p % 49152 for p in range(7, 7 + 3001 * n, 3001)] for n in (3, 17, 40)]
    greedy = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    graphs = {**PIECEWISE, "decode_capture_sizes": [4], "prefill_capture_sizes": [64]}
    limits = {**SETTINGS, "max_model_len": 256}
    with LLM("smollm2-135m", **limits) as llm:
        expected = [result.token_ids for result in llm.generate(prompts, **greedy)]
    for changes in ({}, {"device": "sim", "compilation_config": graphs}):
        with LLM("smollm2-135m", tensor_parallel_size=3, **limits, **changes) as llm:
            assert len(llm.service.workers()[0].ranks) == 2
            found = [result.token_ids for result in llm.generate(prompts, **greedy)]
            assert (llm.service.graph_counters()["body"]["replays"] > 0) == bool(changes)
        assert found == expected
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 .* 1, 3, 9, .* 9 heads and 3 kv heads"):
        LLM("smollm2-135m", tensor_parallel_size=2)
