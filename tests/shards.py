"""The ranks' shares of a model in one process: their sums are taken here, and not by a group."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from piecework import LLM
from piecework.layers.parallel import own_rows
from piecework.models.config import ModelConfig
from piecework.models.decoder import CausalLM
from piecework.models.shard import Shard, shard_config
from piecework.quantization.choose import choose_reader
from piecework.quantization.load import load_model
from piecework.weights.load import open_checkpoint
from piecework.weights.sharded import ShardedCheckpoint
from piecework.weights.source import resolve

IDS = torch.randint(5, 320, (40,), generator=torch.Generator().manual_seed(7))


def load_share(
    where: Path, shard: Shard | None, quantization: str = "auto", load_format: str = "auto"
) -> CausalLM:
    """A rank's part of the model of a folder or file in float32; None: the whole."""
    checkpoint: Any = open_checkpoint(resolve(str(where)), load_format)
    config = ModelConfig.from_dict(checkpoint.config)
    if shard is not None:
        checkpoint, config = ShardedCheckpoint(checkpoint, config, shard), shard_config(config, shard)
    reader = choose_reader(checkpoint, quantization)
    cpu = torch.device("cpu")
    try:
        return load_model(config, checkpoint, reader, dtype=torch.float32, device=cpu, max_positions=64)
    finally:
        checkpoint.close()


@torch.inference_mode()
def summed_logits(ranks: list[CausalLM]) -> Tensor:
    """Logits [T, V] of IDS."""
    positions, first = torch.arange(len(IDS)), ranks[0].model
    owned = [rank.model.vocabulary for rank in ranks]
    tables = [rank.model.embed_tokens for rank in ranks]
    h = sum(own_rows(t, IDS, own.start, len(own)) for t, own in zip(tables, owned, strict=True))
    for index, layer in enumerate(first.layers):
        layers, x = [rank.model.layers[index] for rank in ranks], layer.input_layernorm(h)
        h = h + sum(each.self_attn(x, positions, first.rotary.cos_sin) for each in layers)
        x = layer.post_attention_layernorm(h)
        h = h + sum(each.mlp(x, None) for each in layers)
    rows = first.norm(h)
    return torch.cat([rank.head(rows) for rank in ranks], -1)[:, : ranks[0].config.vocab_size]


def check_shares(where: Path, size: int, most: float = 1e-4, **how: Any) -> None:
    """Each of `size` ranks holds less than the whole, and all of them compute what the whole does."""
    whole = load_share(where, None, **how)
    ranks = [load_share(where, Shard(rank, size), **how) for rank in range(size)]
    held = [sum(p.nbytes for p in model.parameters()) for model in (whole, *ranks)]
    assert max(held[1:]) < held[0] * 1.2 / size + 4096
    with torch.inference_mode():
        expected = whole.head(whole(IDS, torch.arange(len(IDS))))
    assert (summed_logits(ranks) - expected).abs().max() < most


PROMPTS = [[5, 6, 7], [9] * 40, list(range(10, 30))]
SETTINGS = {"dtype": "float32", "threads": 1, "max_num_seqs": 8, "num_pages": 200}


def check_ranks(model: str, size: int, **settings: Any) -> None:
    """`size` processes give the tokens that one gives on a CPU, and log probabilities within 1e-4.

    They ran as they were told: with graphs where `settings` has `sim`, and nothing is left of them.
    """
    greedy = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "logprobs": 2, "prompt_logprobs": 1}
    with LLM(model, **SETTINGS) as llm:
        expected = llm.generate(PROMPTS, **greedy)
    with LLM(model, tensor_parallel_size=size, **{**SETTINGS, **settings}) as llm:
        found = llm.generate(PROMPTS, **greedy)
        (worker,) = llm.service.workers()
        assert worker.kind == "process" and len({worker.pid, os.getpid(), *worker.ranks}) == size + 1
        counters = llm.service.graph_counters()["body"]
        assert (counters["replays"] > 0) == (settings.get("device") == "sim")
        # Attention and two sums in each layer, and one behind the embedding.
        assert counters["holes"] == 3 * llm.service.model_config.num_layers + 1
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        for a, b in zip(_logprobs(ours), _logprobs(theirs), strict=True):
            assert abs(a - b) < 1e-4
    assert all_end((worker.pid, *worker.ranks))


def all_end(pids: Iterable[int]) -> bool:
    """Wait until no process of `pids` runs; one that nobody waited for yet has no command line."""
    for pid in pids:
        for _ in range(1200):
            try:
                if not Path(f"/proc/{pid}/cmdline").read_bytes():
                    break
            except OSError:
                break
            time.sleep(0.05)
        else:
            return False
    return True


def _logprobs(result: Any) -> list[float]:
    rows = [row for row in (*result.prompt_logprobs, *result.logprobs) if row is not None]
    return [value for row in rows for value in (row.logprob, *(score for _, score in row.top))]
