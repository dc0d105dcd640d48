"""The engine over an int8 KV cache: near the float one, half its bytes, and refused where there is none."""

from __future__ import annotations

import random

import pytest
import torch

from piecework import LLM
from piecework.errors import ConfigError
from piecework.kvcache import LayerShape, PagedKVCache
from piecework.native import library

RNG = random.Random(5)
PROMPTS = [[RNG.randrange(320) for _ in range(n)] for n in (3, 40, 120)]


def scores(folder, **settings):
    """Tokens, and the log probabilities of the prompts' tokens, one after the other."""
    with LLM(str(folder), dtype="float32", threads=1, **settings) as llm:
        found = llm.generate(PROMPTS, temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
        again = llm.generate(PROMPTS, temperature=0, max_tokens=8, ignore_eos=True)
        assert [r.token_ids for r in again] == [r.token_ids for r in found]
        runner = llm.service.runner
        chained = llm.service.graph_counters()["body"]["chained_runs"]
    logprobs = [entry.logprob for r in found for entry in r.prompt_logprobs[1:]]
    return [r.token_ids for r in found], torch.tensor(logprobs), runner.cache, chained


@pytest.fixture(scope="module")
def chained(folder):
    return scores(folder, kv_cache_dtype="int8")


def test_log_probabilities_are_near_those_of_a_float_cache(folder, chained):
    _, wanted, floats, _ = scores(folder)
    _, got, cache, _ = chained
    assert cache.dtype is torch.int8 and all(scale.any() for scale in cache.key_scales + cache.value_scales)
    assert cache.keys[0].dtype is torch.int8 and floats.key_scales == ()
    error = (got - wanted).square().mean().sqrt() / (wanted.max() - wanted.min())
    assert 0 < error < 0.01


@pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
def test_as_one_call_and_piece_by_piece(folder, chained):
    tokens, logprobs, _, runs = chained
    other = scores(folder, kv_cache_dtype="int8", compilation_config={"chain": False})
    assert runs > 0 and other[3] == 0
    assert tokens == other[0] and torch.equal(logprobs, other[1])


def test_a_whole_program_reads_the_scales(folder, chained):
    whole = {"compiler": "dynamo:eager", "splitting_ops": [], "decode_capture_sizes": [1, 3]}
    settings = {"dtype": "float32", "threads": 1, "compilation_config": whole}
    with LLM(str(folder), kv_cache_dtype="int8", **settings) as llm:
        found = llm.generate(PROMPTS, temperature=0, max_tokens=8, ignore_eos=True)
        assert llm.service.graph_counters()["body"]["whole_runs"] > 0
    assert [r.token_ids for r in found] == chained[0]


def test_the_cache_has_the_bytes_it_says(folder, chained):
    cache = chained[2]
    layers = [LayerShape(k.shape[1], k.shape[3]) for k in cache.keys]
    assert cache.nbytes == cache.num_pages * sum(s.page_bytes(cache.page_size, torch.int8) for s in layers)
    assert len(cache.tensors()) == 4 * len(layers)
    assert isinstance(cache, PagedKVCache)


def test_a_device_without_it_refuses_it_by_name(folder):
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='int8'.*sim"):
        LLM(str(folder), device="sim", kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        LLM(str(folder), kv_cache_dtype="fp8")
