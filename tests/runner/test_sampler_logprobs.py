"""Log probabilities of chosen tokens, alternatives and prompts."""

from __future__ import annotations

import json
import math

import pytest
import torch
from sampling_states import peaked, state

from piecework.runner import vocab
from piecework.runner.sampler import NonFiniteLogitsError, prompt_logprobs, sample
from piecework.sampling import LOWEST_LOGPROB, TokenLogprob


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    logits = peaked(1, 50)
    exact = logits.double().log_softmax(dim=-1)[0]
    row = state(seed=5, temperature=0.1, top_k=2, logit_bias={3: 100.0}, logprobs=4)
    drawn = sample(logits, [row])
    entry = drawn.logprobs[0]
    assert entry is not None
    assert drawn.token_ids == [3] and entry.token_id == 3
    assert entry.logprob == pytest.approx(float(exact[3]), abs=1e-5)
    order = exact.argsort(descending=True)[:4].tolist()
    assert [token for token, _ in entry.top] == order
    assert [value for _, value in entry.top] == pytest.approx(exact[order].tolist(), abs=1e-5)


def test_each_row_gets_what_it_asked_for() -> None:
    rows = [state(logprobs=None), state(logprobs=0), state(logprobs=7, temperature=0), state(logprobs=20)]
    entries = sample(peaked(4, 15), rows).logprobs
    assert entries[0] is None
    assert [len(entry.top) for entry in entries[1:] if entry] == [0, 7, 15]
    assert entries[2] and entries[2].top[0][0] == entries[2].token_id


@pytest.mark.parametrize("numpy", [True, False])
def test_equal_log_probabilities_rank_by_id(monkeypatch: pytest.MonkeyPatch, numpy: bool) -> None:
    monkeypatch.setattr(vocab, "_uses_numpy", lambda values: numpy)
    logits = torch.zeros(1, 3000)
    logits[0, [2000, 1000]] = 1.0
    logits[0, 5] = 2.0
    entry = sample(logits, [state(logprobs=5)]).logprobs[0]
    assert entry is not None
    assert [token for token, _ in entry.top] == [5, 1000, 2000, 0, 1]


def test_minus_infinity_is_a_number_that_json_can_say() -> None:
    logits = torch.full((1, 4), -torch.inf)
    logits[0, 2] = 0.0
    entry = sample(logits, [state(logprobs=4)]).logprobs[0]
    assert entry == TokenLogprob(2, 0.0, ((2, 0.0), *((token, LOWEST_LOGPROB) for token in (0, 1, 3))))
    assert "Infinity" not in json.dumps(entry.top)
    assert prompt_logprobs(logits, [0], 0) == [TokenLogprob(0, -9999.0)]


def test_prompt_log_probabilities() -> None:
    logits = peaked(100, 64)
    targets = [row % 64 for row in range(100)]
    exact = logits.double().log_softmax(dim=-1)
    entries = prompt_logprobs(logits, targets, 3)
    assert len(entries) == 100
    for row, entry in enumerate(entries):
        assert entry.token_id == targets[row]
        assert entry.logprob == pytest.approx(float(exact[row, targets[row]]), abs=1e-5)
        assert [token for token, _ in entry.top] == exact[row].argsort(descending=True)[:3].tolist()
    assert entries[40:41] == prompt_logprobs(logits[40:41], targets[40:41], 3)
    assert prompt_logprobs(logits.bfloat16()[:1], [4], 0)[0].logprob == pytest.approx(
        math.log(float(logits[:1].bfloat16().float().softmax(-1)[0, 4])), abs=1e-5
    )
    assert prompt_logprobs(logits[:0], [], 3) == []


def test_prompt_log_probabilities_refuse_what_they_cannot_use() -> None:
    logits = peaked(70, 8)
    logits[65, 1] = torch.nan
    with pytest.raises(NonFiniteLogitsError) as caught:
        prompt_logprobs(logits, [0] * 70, 1)
    assert caught.value.rows == (65,)
    with pytest.raises(ValueError, match="3 targets"):
        prompt_logprobs(logits, [0] * 3, 1)
