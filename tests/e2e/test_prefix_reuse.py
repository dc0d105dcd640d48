"""The default model with a beginning of 1,000 tokens that 32 requests share."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from piecework import LLM
from piecework.profile import now

SHARED = 1000
PAIRS = 5


@pytest.mark.slow
def test_32_requests_with_a_shared_beginning_get_what_they_get_cold() -> None:
    text = (Path(__file__).parents[2] / "docs" / "passes.md").read_text(encoding="utf-8")
    found = {}
    for caching in (False, True):
        with LLM("smollm2-135m", dtype="float32", prefix_caching=caching, max_num_seqs=8) as llm:
            tokenizer = llm.service.tokenizer
            assert tokenizer is not None
            shared = tokenizer.encode(text)[:SHARED]
            prompts = [[*shared, *tokenizer.encode(f"\nQuestion {i}: what is it?")] for i in range(32)]
            assert len(shared) == SHARED
            # Eight of them cold: those of another batch are compared by the tests of batching.
            asked = prompts if caching else prompts[:8]
            found[caching] = llm.generate(asked, temperature=0, max_tokens=8, ignore_eos=True)
            stats = llm.service.stats()
    assert [r.token_ids for r in found[True][:8]] == [r.token_ids for r in found[False]]
    known = SHARED // 16 * 16
    assert [r.usage.cached_tokens >= known for r in found[True]] == [False] + [True] * 31
    # A later one computes the rest of its prompt: less than a tenth of it.
    assert all(r.usage.prompt_tokens - r.usage.cached_tokens < SHARED // 10 for r in found[True][1:])
    assert stats.kv_pages_used == 0 and stats.prefix_hits_total == 31


@pytest.mark.slow
def test_a_shared_beginning_takes_a_tenth_of_the_time() -> None:
    """The median ratio of requests that follow each other, so that one that was disturbed is no matter."""
    text = (Path(__file__).parents[2] / "docs" / "passes.md").read_text(encoding="utf-8")
    ratios, computed = [], []
    with LLM("smollm2-135m", dtype="float32") as llm:
        tokenizer = llm.service.tokenizer
        assert tokenizer is not None
        shared, last = tokenizer.encode(text)[: SHARED - 1], tokenizer.encode("\nQuestion: what is it?")
        for first in range(100, 100 + PAIRS):  # a first token of its own: nobody had this beginning before
            taken = []
            for ask in ("a", "b"):
                start = now()
                (result,) = llm.generate(
                    [first, *shared, *tokenizer.encode(ask), *last], max_tokens=1, temperature=0
                )
                taken.append(now() - start)
                computed.append(result.usage.prompt_tokens - result.usage.cached_tokens)
            ratios.append(taken[1] / taken[0])
    assert min(computed[::2]) >= SHARED and max(computed[1::2]) <= SHARED % 16 + 16 < SHARED // 10
    assert median(ratios) <= 0.1, ratios


@pytest.mark.slow
def test_a_chat_goes_on_without_reading_its_turns_again() -> None:
    with LLM("smollm2-135m", dtype="float32") as llm:
        messages = [{"role": "user", "content": "Name three rivers of Europe, with a sentence for each."}]
        (first,) = llm.chat(messages, temperature=0, max_tokens=60)
        messages += [
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "Which of them is the longest?"},
        ]
        (second,) = llm.chat(messages, temperature=0, max_tokens=20)
    # The turn as text has the same tokens as when it was generated, but for its end.
    turns = first.usage.prompt_tokens + first.usage.completion_tokens
    assert second.usage.cached_tokens >= turns - 2 * 16 > first.usage.prompt_tokens
