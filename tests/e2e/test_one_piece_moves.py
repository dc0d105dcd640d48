"""The default model: one of its pieces fails in a decode step, and only that one moves."""

from __future__ import annotations

import pytest

from piecework import LLM

PROMPT = "The capital of France is"
SETTINGS = {"dtype": "float32", "num_pages": 64, "max_model_len": 256}


@pytest.mark.slow
def test_piece_15_fails_at_decode_step_7() -> None:
    def run(**settings: object) -> tuple[object, LLM]:
        with LLM("smollm2-135m", **SETTINGS, **settings) as llm:  # type: ignore[arg-type]
            cache = llm.service.runner.cache.tensors()
            (result,) = llm.generate(PROMPT, temperature=0.0, max_tokens=16, ignore_eos=True)
            after = llm.service.runner.cache.tensors()
            assert all(after[name] is tensor for name, tensor in cache.items())
            return result.token_ids, llm

    eager = {"compilation_config": {"decode_graph": "eager", "prefill_graph": "eager"}}
    clean, _ = run(device="sim", **eager)
    tokens, llm = run(device="sim,cpu", inject_fault="point=run,device=0,step=7,piece=15")
    assert tokens == clean
    body = llm.service.runner.programs.body
    counts = llm.service.graph_counters()["body"]
    assert (body.num_pieces, body.num_distinct, counts["moved_pieces"]) == (31, 3, 1)
    assert [piece.moved for piece in body.pieces] == [False, True, False]
    assert llm.service.failovers() == () and llm.service.device_name == "sim"
