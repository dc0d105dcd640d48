"""A model whose weights are laid out for the kernels gives what it gives without, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rss import run_measured
from tiny import save_tiny

from piecework import LLM
from piecework.layers.coded import CodedEmbedding, CodedLinear
from piecework.native import reads_panels

pytestmark = pytest.mark.skipif(not reads_panels(), reason="no kernel here multiplies coded weights")
PROMPTS = [[5, 17, 200, 31], [9] * 20, [1, 2, 3]]


def run(folder: Path, **settings: Any) -> tuple[list[list[int]], list[Any], set[type]]:
    """Tokens, log-probabilities, and the kinds of layers that the model has."""
    with LLM(str(folder), **{"dtype": "bfloat16", **settings}) as llm:
        found = llm.generate(PROMPTS, max_tokens=12, temperature=0, ignore_eos=True, logprobs=5)
        kinds = {type(module) for module in llm.service.runner.programs.model.modules()}
        if "quantization" not in settings:
            assert llm.service.repacked == bool({CodedLinear, CodedEmbedding} & kinds)
    return [r.token_ids for r in found], [r.logprobs for r in found], kinds


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3_moe"])
def test_results_are_those_of_weights_as_they_are(tmp_path: Path, architecture: str) -> None:
    folder = save_tiny(tmp_path, architecture, tokenizer=True)
    tokens, logprobs, kinds = run(folder)
    assert {CodedLinear, CodedEmbedding} <= kinds
    plain_tokens, plain_logprobs, plain_kinds = run(folder, repack=False)
    assert not {CodedLinear, CodedEmbedding} & plain_kinds
    assert tokens == plain_tokens and logprobs == plain_logprobs and logprobs[0] is not None


@pytest.mark.parametrize("scheme", ["w8a8-dynamic", "w8"])
def test_int8_weights_are_laid_out_and_give_the_same(tmp_path: Path, scheme: str) -> None:
    folder = save_tiny(tmp_path, "qwen3", tokenizer=True, hidden_size=128)
    settings = {"quantization": scheme, "lm_head": scheme, "dtype": "float32"}
    found, plain = (run(folder, **settings, repack=repack) for repack in (True, False))
    assert found[:2] == plain[:2]
    with LLM(str(folder), **settings) as llm:
        model = llm.service.runner.programs.model
        weights = [p for p in model.parameters() if p.dtype == torch.int8]
        assert llm.service.repacked and llm.service.quantized == f"{scheme} with a head in {scheme}"
    assert {w.dim() for w in weights} == {3} and len(weights) == 4 * 3 + 1


@pytest.mark.parametrize(
    "settings",
    [
        {"compilation_config": {"compiler": "eager"}},
        {"device": "cpu,sim"},
        {"device": "cpu", "place": "head:sim"},
    ],
    ids=str,
)
def test_weights_stay_where_pieces_run_elsewhere(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = save_tiny(tmp_path, "llama", tokenizer=True)
    _, _, kinds = run(folder, **settings)
    assert not {CodedLinear, CodedEmbedding} & kinds


def test_the_model_is_never_in_memory_twice() -> None:
    """It has 97 MiB in bfloat16 and 75 in 12 bits. Processes keep much of what they free."""
    sizes = "hidden_size=512, intermediate_size=2048, num_hidden_layers=12, num_key_value_heads=4"
    peak = run_measured(
        f"""
        import sys, torch
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        from tiny import tiny_config
        from piecework.models.config import ModelConfig
        from piecework.quantization.load import load_model
        from piecework.weights.dummy import DummyCheckpoint
        class Checkpoint(DummyCheckpoint):
            def read(self, name, out):
                out.normal_()
        def load(**sizes):
            fields = tiny_config("llama", **sizes).to_dict()
            checkpoint = Checkpoint(fields, {{}}, 0, "memory")
            config = ModelConfig.from_dict(fields)
            how = dict(dtype=torch.bfloat16, device=torch.device("cpu"), max_positions=64)
            return load_model(config, checkpoint, None, **how, repacked=True)
        load()
        del (freed := [torch.empty(2**22)])[:]
        """,
        f"""
        model = load({sizes})
        weights = sum(p.nbytes for p in model.parameters())
        assert 70 * 2**20 < weights < 76 * 2**20
        """,
    )
    assert 70 * 2**20 < peak < 120 * 2**20
