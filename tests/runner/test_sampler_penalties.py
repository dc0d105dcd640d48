"""Logit bias, banned ids and penalties change exactly what their formulas say."""

from __future__ import annotations

import math
from array import array

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_states import peaked, state

from piecework.runner.penalties import edit, needs_edit
from piecework.runner.sampler import SamplingState, sample

SIZE = 12
ids = st.lists(st.integers(0, SIZE - 1), max_size=8)


def expected(logits: list[float], s: SamplingState) -> list[float]:
    """The formulas, id by id."""
    out = []
    params = s.params
    for token, value in enumerate(logits):
        value += params.logit_bias.get(token, 0.0)
        if token in s.banned_ids:
            value = -math.inf
        if token in [*s.prompt_ids, *s.output_ids]:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        count = list(s.output_ids).count(token)
        value -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        out.append(value)
    return out


@given(
    rows=st.lists(
        st.builds(
            state,
            prompt=ids,
            output=ids,
            banned=st.tuples(st.integers(0, SIZE - 1)) | st.just(()),
            logit_bias=st.dictionaries(st.integers(0, SIZE - 1), st.floats(-100, 100), max_size=3),
            repetition_penalty=st.floats(0.5, 2) | st.just(1.0),
            presence_penalty=st.floats(-2, 2) | st.just(0.0),
            frequency_penalty=st.floats(-2, 2) | st.just(0.0),
        ),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=100, deadline=None)
def test_edits_follow_the_formulas(rows: list[SamplingState]) -> None:
    logits = peaked(len(rows) + 1, SIZE)
    changed = logits.clone()
    edit(changed, range(1, len(rows) + 1), rows)
    assert torch.equal(changed[0], logits[0])
    for row, s in enumerate(rows, start=1):
        wanted = torch.tensor(expected(logits[row].tolist(), s))
        torch.testing.assert_close(changed[row], wanted, rtol=1e-5, atol=1e-5)
        if not needs_edit(s):
            assert torch.equal(changed[row], logits[row])


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {1: 1.0}},
        {"banned": (1,)},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
    ],
)
def test_every_setting_is_noticed(params: dict[str, object]) -> None:
    assert needs_edit(state(**params))  # type: ignore[arg-type]
    assert not needs_edit(state())


def test_ids_outside_the_vocabulary_do_not_touch_other_rows() -> None:
    logits = peaked(3, SIZE)
    changed = logits.clone()
    far = state(prompt=[SIZE, -1], banned=(SIZE + 1,), logit_bias={SIZE: 5.0}, repetition_penalty=2.0)
    edit(changed, [1], [far])
    assert torch.equal(changed, logits)


def test_ids_may_come_as_arrays() -> None:
    logits = peaked(1, SIZE)
    results = []
    for kind in (list, tuple, np.array, lambda values: array("q", values)):
        changed = logits.clone()
        edit(changed, [0], [state(prompt=kind([1, 1, 2]), output=kind([3]), repetition_penalty=1.5)])
        results.append(changed)
    assert all(torch.equal(result, results[0]) for result in results)
    assert not torch.equal(results[0], logits)


def test_sampling_leaves_the_logits_as_they_were() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = peaked(2, SIZE).to(dtype)
        before = logits.clone()
        best = int(logits[0].argmax())
        rows = [state(temperature=0, banned=(best,)), state(seed=3, logit_bias={4: 100.0})]
        drawn = sample(logits, rows).token_ids
        assert torch.equal(logits, before)
        assert drawn == [int(before[0].float().topk(2).indices[1]), 4]
