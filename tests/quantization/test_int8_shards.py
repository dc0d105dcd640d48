"""Int8 layers whose weights are divided between ranks: scales go with their channels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from int8_checkpoints import logits, write
from reference import nrmse
from shards import check_ranks, check_shares, load_share, summed_logits
from tiny import PIECEWISE

from piecework.layers.int8 import W8A8Linear
from piecework.models.shard import Shard


@pytest.mark.parametrize(
    ("kind", "style"),
    [
        ("static", "compressed"),
        ("asymmetric", "compressed"),
        ("asymmetric", "modelslim"),
        ("w8", "modelslim"),
    ],
)
def test_shares_are_the_whole(tmp_path: Path, kind: str, style: str) -> None:
    folder, _ = write(tmp_path, "llama", kind, style, attention_bias=True, mlp_bias=True)
    check_shares(folder, 2)


def test_experts_without_an_int8_op(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, "qwen3_moe", "w8")
    check_shares(folder, 2)


def test_an_offset_is_undone_by_each_rank_and_a_bias_added_by_one(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, "llama", "asymmetric", attention_bias=True)
    ranks = [load_share(folder, Shard(rank, 2)).model.layers[0].self_attn.o_proj for rank in range(2)]
    whole = load_share(folder, None).model.layers[0].self_attn.o_proj
    assert all(isinstance(layer, W8A8Linear) for layer in (whole, *ranks))
    assert torch.equal(ranks[0].quant_bias + ranks[1].quant_bias, whole.quant_bias)
    assert torch.equal(ranks[0].bias, whole.bias) and not ranks[1].bias.any()
    assert torch.equal(ranks[1].scale, whole.scale)


def test_rows_with_scales_of_their_own_are_near_the_whole(tmp_path: Path) -> None:
    """A rank quantises its part of a row by the largest value there, which is not the whole row's."""
    folder, model = write(tmp_path, "llama", "dynamic")
    shares = summed_logits([load_share(folder, Shard(rank, 2)) for rank in range(2)])
    assert 0 < nrmse(shares, logits(model)) < 2e-2


@pytest.mark.timeout(900)
def test_ranks_of_static_int8_with_a_shared_kv_head(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, "qwen3", "static", num_key_value_heads=1)
    check_ranks(str(folder), 2, device="sim", compilation_config=PIECEWISE)
