"""Whole models whose named ops run as Triton kernels give the tokens of the CPU's own."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from tiny import save_tiny

import piecework.ops as ops
from piecework import LLM, SamplingParams
from piecework.devices.cpu import CpuDevice
from piecework.graph import lower

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs under the interpreter only")

EXPECTED = {
    ("llama", "auto"): {"rms_norm", "add_rms_norm", "split_qkv_rope", "silu_and_mul", "paged_attention"},
    ("qwen3", "auto"): {"add_rms_norm", "split_qkv_rmsnorm_rope", "silu_and_mul", "paged_attention"},
    ("qwen3", "w8a8-dynamic"): {
        "rms_norm_dynamic_quant",
        "add_rms_norm_dynamic_quant",
        "silu_mul_dynamic_quant",
        "linear_w8a8",
        "paged_attention",
    },
    ("mistral", "w8"): {"linear_w8", "add_rms_norm", "split_qkv_rope", "paged_attention"},
}
PROMPTS = [[5, 9, 200, 17, 3], [7, 8]]


def run(model: str, quantization: str) -> list[list[int]]:
    config = {"compiler": "eager"}
    with LLM(
        model,
        device="cpu",
        dtype="float32",
        quantization=quantization,
        max_num_seqs=2,
        max_model_len=64,
        kv_cache_memory=2**20,
        compilation_config=config,
    ) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        return [result.token_ids for result in llm.generate(PROMPTS, params)]


@pytest.mark.slow
@pytest.mark.parametrize("name, quantization", EXPECTED)
def test_tokens_through_triton_kernels(name, quantization, tmp_path, monkeypatch):
    model = str(save_tiny(tmp_path, name, num_hidden_layers=2))
    monkeypatch.setenv("PIECEWORK_CACHE", str(tmp_path / "cache"))
    expected = run(model, quantization)
    ran: Counter[str] = Counter()
    undecided: list[str] = []

    def counted(op: ops.Op, plain):
        def call(*args):
            ran[op.name] += 1
            return plain(*args)

        return call

    for op in map(ops.get, ops.names()):
        if found := op.implementations.get("triton"):
            counting = replace(found, run=counted(op, found.run))
            monkeypatch.setitem(op.implementations, "triton", counting)
    by_call = lower.ByCall
    monkeypatch.setattr(lower, "ByCall", lambda name, order: undecided.append(name) or by_call(name, order))
    monkeypatch.setattr(CpuDevice, "op_order", ("triton", "cpu", "reference"))
    assert run(model, quantization) == expected
    assert ran.keys() >= EXPECTED[name, quantization]
    assert undecided == []  # a kernel is chosen once, whatever the number of tokens
