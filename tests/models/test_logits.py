"""Logits of every model equal those of `transformers`: prefill, then decoding with a cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_kv import DenseKV
from hf_weights import copy_weights
from reference import load_reference
from tiny import NAMES, randomize, save_tiny, tiny_config, tiny_model
from torch import Tensor

from piecework.models.build import build_model
from piecework.models.config import ModelConfig, RopeConfig
from piecework.models.decoder import CausalLM
from piecework.weights.load import load_weights, open_checkpoint
from piecework.weights.source import resolve

PROMPT, STEPS = 21, 16
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 32}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    ("llama", {"tie_word_embeddings": True, "head_dim": 24, "num_key_value_heads": 4}),
    ("llama", {"rope_parameters": LINEAR, "num_hidden_layers": 1}),
    ("llama", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0, "truncate": False}}),
    ("mistral", {}),
    ("mistral", {"sliding_window": None, "head_dim": 32}),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": False, "tie_word_embeddings": False, "rope_parameters": YARN}),
    ("qwen3", {}),
    (
        "qwen3",
        {"attention_bias": True, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    ("qwen3", {"rope_parameters": {**YARN, "attention_factor": 1.3}, "tie_word_embeddings": False}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": [], "decoder_sparse_step": 2}),
    ("qwen3_moe", {"attention_bias": True, "use_sliding_window": True, "sliding_window": 7}),
]


def ours(reference: Any, dtype: torch.dtype = torch.float32, **wrong: Any) -> CausalLM:
    """Our model with the reference's weights; `wrong` replaces fields of its config."""
    config = replace(ModelConfig.from_dict(reference.config.to_dict()), **wrong)
    model = build_model(config, dtype=dtype, device="cpu", max_positions=PROMPT + STEPS)
    copy_weights(model, reference.state_dict())
    return model


def loaded(folder: Path) -> CausalLM:
    """The model of a folder, read by the package's own loader."""
    checkpoint = open_checkpoint(resolve(str(folder)))
    config = ModelConfig.from_dict(checkpoint.config)
    model = build_model(config, dtype=torch.float32, device="cpu", max_positions=PROMPT + STEPS)
    load_weights(model, checkpoint)
    checkpoint.close()
    return model


def reference_run(reference: Any) -> tuple[Tensor, Tensor]:
    """Random tokens [PROMPT + STEPS] and the reference's logits at each of them."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, reference.config.vocab_size, (PROMPT + STEPS,), generator=generator)
    return ids, reference(ids[None], use_cache=False).logits[0]


def our_run(model: CausalLM, ids: Tensor) -> Tensor:
    """Our logits at each of `ids`: one prefill of PROMPT tokens, then one token at a time over a cache."""
    model.bind_attention(DenseKV(model.attention_specs))
    positions = torch.arange(len(ids))
    parts = [slice(0, PROMPT)] + [slice(i, i + 1) for i in range(PROMPT, len(ids))]
    return torch.cat([model.head(model(ids[part], positions[part])) for part in parts])


def worst(got: Tensor, expected: Tensor) -> float:
    return (got - expected).abs().max().item()


@pytest.mark.parametrize(("name", "overrides"), CASES, ids=lambda v: v if isinstance(v, str) else "-".join(v))
def test_logits_equal_transformers(name: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, name, **overrides)
    ids, expected = reference_run(load_reference(folder))
    got = our_run(loaded(folder), ids)
    assert got.shape == expected.shape
    print(f"MAXERR {name} {overrides} {worst(got, expected):.2e}")
    assert worst(got, expected) < 1e-4


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("llama", {"rope": RopeConfig()}),
        ("llama", {"rms_norm_eps": 1e-2}),
        ("mistral", {"windows": ()}),
        ("mistral", {"windows": (9, 9, 9)}),
        ("qwen2", {"windows": (6, 6, 6)}),
        (
            "qwen3",
            {"rope": RopeConfig(type="yarn", factor=4.0, original_max_position=64, attention_factor=1.0)},
        ),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("qwen3_moe", {"num_experts_per_tok": 3}),
    ],
)
def test_comparison_sees_a_wrong_feature(name: str, wrong: dict[str, Any]) -> None:
    reference = tiny_model(name)
    ids, expected = reference_run(reference)
    assert worst(our_run(ours(reference, **wrong), ids), expected) > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_logits_are_near(name: str) -> None:
    reference = tiny_model(name)
    ids, expected = reference_run(reference)
    got = our_run(ours(reference, torch.bfloat16), ids)
    nrmse = (got - expected).square().mean().sqrt() / (expected.max() - expected.min())
    print(f"NRMSE {name} {nrmse:.2e}")
    assert got.dtype == torch.bfloat16
    assert nrmse < 2e-2


def test_partial_rotary_equals_transformers() -> None:
    # Phi-3 is Llama with its own packed names and, in transformers, with partial rotary embedding.
    from transformers import Phi3Config, Phi3ForCausalLM

    fields = tiny_config("llama", rope_parameters=None, head_dim=None).to_dict()
    fields.pop("head_dim")
    reference = Phi3ForCausalLM(Phi3Config(**fields, partial_rotary_factor=0.5)).eval().requires_grad_(False)
    randomize(reference, seed=0)
    config = {**reference.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    model = build_model(
        ModelConfig.from_dict(config), dtype=torch.float32, device="cpu", max_positions=PROMPT + STEPS
    )
    copy_weights(model, reference.state_dict())
    ids, expected = reference_run(reference)
    assert model.config.rotary_dim == 8
    assert worst(our_run(model, ids), expected) < 1e-4
