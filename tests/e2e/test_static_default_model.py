"""The default model in programs of fixed shapes: the reference's tokens at every edge and across moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openvino", reason="the package openvino is not installed")

from reference import compare_greedy, load_reference

from piecework import LLM
from piecework.errors import RequestError
from piecework.weights.source import resolve

CHUNK, SIZES = 128, (256, 512, 1024)
TURN = [28, 198, 198, 788, 506]
EDGES = [
    (1, 2),
    (CHUNK - 1, 2),
    (CHUNK, 2),
    (CHUNK + 1, 2),
    (255, 4),
    (256, 2),
    (257, 2),
    (511, 4),
    (512, 2),
    (513, 2),
    (1023, 2),
    (1024, 1),
]


@pytest.mark.slow
def test_the_default_model_at_every_edge() -> None:
    """It takes 2.2 GB: prefill has a packed copy of the weights, and decode another one.

    A prompt at each edge, and a chat that goes on where the prompt of 255 ended.
    """
    source = resolve("smollm2-135m")
    text = (Path(__file__).parents[2] / "docs" / "passes.md").read_text(encoding="utf-8")
    greedy: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
    prompts: list[list[int]] = []
    outputs: list[list[int]] = []
    with LLM(
        "smollm2-135m",
        device="openvino:CPU",
        dtype="float32",
        kv_strategy="static",
        kv_capacities=",".join(map(str, SIZES)),
        chunk_size=CHUNK,
        kv_transpose_values=True,
    ) as llm:
        assert llm.service.tokenizer is not None
        ids = llm.service.tokenizer.encode(text)

        def ask(prompt: list[int], count: int) -> int:
            (answer,) = llm.generate(prompt, max_tokens=count, **greedy)
            prompts.append(prompt)
            outputs.append(list(answer.token_ids))
            return int(answer.usage.cached_tokens)

        for length, count in EDGES:
            # Short ones begin anew; each longer one continues the one before it.
            first = length if length <= CHUNK + 1 else 0
            ask(ids[first : first + length], count)
            if length == SIZES[0] - 1:
                assert ask([*prompts[-1], *outputs[-1], *TURN], 2) > length - 16
        for length, room in ((SIZES[-1] + 1, 1), (SIZES[0], SIZES[-1])):
            with pytest.raises(RequestError, match=rf"kv_capacities is {SIZES[-1]} tokens"):
                llm.generate(ids[:length], max_tokens=room, **greedy)
        counters = llm.service.graph_counters()["body"]
        assert llm.service.runner.compilers == ("openvino",)
        assert counters["whole_runs"] > 20 and counters["recompiles"] == 0
        moved = llm.service.stats().kv_moved_bytes
        reasons = ("to_decode", "promotion", "to_prefill")
        assert all(moved[f"{reason}.{name}"] > 0 for reason in reasons for name in ("keys", "values"))
    found = compare_greedy(load_reference(source.path), prompts, outputs)
    assert not found.wrong and not found.flips
    assert found.compared == sum(count for _, count in EDGES) + 2
