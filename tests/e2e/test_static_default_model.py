"""The default model in programs of fixed shapes: the eager engine's tokens at every edge and across moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openvino", reason="the package openvino is not installed")

from piecework import LLM
from piecework.errors import RequestError

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


def answers(device: str, **settings: Any) -> tuple[list[list[int]], Any]:
    """Greedy tokens for a prompt at each edge, then a chat that goes on where the prompt of 255 ended."""
    text = (Path(__file__).parents[2] / "docs" / "passes.md").read_text(encoding="utf-8")
    greedy: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
    with LLM("smollm2-135m", device=device, dtype="float32", **settings) as llm:
        assert llm.service.tokenizer is not None
        ids = llm.service.tokenizer.encode(text)
        found: list[list[int]] = []
        for length, count in EDGES:
            # Short ones begin anew; each longer one continues the one before it.
            first = length if length <= CHUNK + 1 else 0
            asked = ids[first : first + length]
            found.append(list(llm.generate(asked, max_tokens=count, **greedy)[0].token_ids))
            if length == SIZES[0] - 1:
                asked = [*asked, *found[-1], *TURN]
                (again,) = llm.generate(asked, max_tokens=2, **greedy)
                assert again.usage.cached_tokens > length - 16
                found.append(list(again.token_ids))
        runner = llm.service.runner
        counters = llm.service.graph_counters()["body"]
        if device != "cpu":
            for length, room in ((SIZES[-1] + 1, 1), (SIZES[0], SIZES[-1])):
                with pytest.raises(RequestError, match=rf"kv_capacities is {SIZES[-1]} tokens"):
                    llm.generate(ids[:length], max_tokens=room, **greedy)
        moved = llm.service.stats().kv_moved_bytes
        return found, (runner.compilers, counters["whole_runs"], counters["recompiles"], moved)


@pytest.mark.slow
def test_the_default_model_at_every_edge() -> None:
    """It takes 2.2 GB: prefill has a packed copy of the weights, and decode another one."""
    tokens, (compilers, runs, recompiles, moved) = answers(
        "openvino:CPU",
        kv_strategy="static",
        kv_capacities=",".join(map(str, SIZES)),
        chunk_size=CHUNK,
        kv_transpose_values=True,
    )
    assert compilers == ("openvino",) and runs > 20 and recompiles == 0
    reasons = ("to_decode", "promotion", "to_prefill")
    assert all(moved[f"{reason}.{name}"] > 0 for reason in reasons for name in ("keys", "values"))
    eager, _ = answers("cpu")
    assert tokens == eager
