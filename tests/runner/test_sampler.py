"""What sampling gives for single rows, and that rows don't depend on each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_states import draws, peaked, state

from piecework.runner import vocab
from piecework.runner.sampler import NonFiniteLogitsError, Sampled, SamplingState, sample

states = st.builds(
    state,
    seed=st.integers(0, 2**64 - 1),
    index=st.integers(0, 1000),
    prompt=st.lists(st.integers(0, 6), max_size=5),
    output=st.lists(st.integers(0, 6), max_size=5),
    banned=st.just(()) | st.just((0, 3)),
    temperature=st.sampled_from([0.0, 1e-9, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, -1, 1, 5, 2000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.2, 1e-6]),
    min_p=st.sampled_from([0.0, 0.02, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    logprobs=st.sampled_from([None, 0, 3, 20]),
)


@pytest.fixture(params=["numpy", "torch"])
def operations(request: pytest.FixtureRequest) -> Iterator[str]:
    """The vocabulary operations of the CPU, and those of all other devices, run on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(vocab, "_uses_numpy", lambda values: False)
        yield request.param


@given(
    rows=st.lists(states, min_size=1, max_size=6),
    size=st.sampled_from([7, 300, 5000]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    spread=st.sampled_from([0.0, 0.2, 3.0]),
)
@settings(max_examples=80, deadline=None)
def test_a_row_alone_equals_the_row_in_any_batch(
    rows: list[SamplingState], size: int, dtype: torch.dtype, spread: float
) -> None:
    logits = (peaked(len(rows), size) * spread).to(dtype)
    together = sample(logits, rows)
    for row, one in enumerate(rows):
        alone = sample(logits[row : row + 1], [one])
        assert alone == Sampled([together.token_ids[row]], [together.logprobs[row]])
    backwards = sample(logits.flip(0), rows[::-1])
    assert backwards.token_ids == together.token_ids[::-1]
    assert backwards.logprobs == together.logprobs[::-1]


def test_a_row_alone_equals_the_row_in_a_large_batch_on_two_threads() -> None:
    logits = peaked(24, 49152)
    kinds = [{}, {"top_p": 0.95}, {"top_k": 40}, {"min_p": 0.05}, {"temperature": 0}, {"logprobs": 5}]
    rows = [state(seed=row, **kinds[row % len(kinds)]) for row in range(24)]  # type: ignore[arg-type]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = sample(logits, rows)
        for row in range(24):
            alone = sample(logits[row : row + 1].clone(), [rows[row]])
            assert (alone.token_ids[0], alone.logprobs[0]) == (
                together.token_ids[row],
                together.logprobs[row],
            )
    finally:
        torch.set_num_threads(threads)


@pytest.mark.usefixtures("operations")
def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(2, 1000)
    logits[1, [900, 77, 500]] = 3.0
    assert sample(logits, [state(temperature=0), state(temperature=0)]).token_ids == [0, 77]


def test_greedy_does_not_depend_on_seed_or_filters() -> None:
    logits = peaked(3, 500)
    wanted = logits.argmax(dim=-1).tolist()
    for seed in range(5):
        rows = [state(seed=seed, temperature=0), state(seed=seed, temperature=0, top_p=0.1), state(top_k=1)]
        assert sample(logits, rows).token_ids == wanted


def test_the_two_sets_of_operations_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        state(seed=seed, temperature=t, top_k=k, top_p=p, min_p=m, logprobs=4)
        for seed, (t, k, p, m) in enumerate(
            [(1, 0, 1, 0), (1, 5, 1, 0), (0.7, 0, 0.9, 0), (2, 0, 0.99, 0), (1, 1500, 0.9, 0), (0, 0, 1, 0.1)]
            * 4
        )
    ]
    for logits in (peaked(len(rows), 3000), peaked(len(rows), 3000).bfloat16(), torch.zeros(len(rows), 3000)):
        here = sample(logits, rows)
        with monkeypatch.context() as patch:
            patch.setattr(vocab, "_uses_numpy", lambda values: False)
            assert sample(logits, rows) == here


@pytest.mark.usefixtures("operations")
def test_equal_logits_are_kept_or_dropped_together_and_drawn_equally() -> None:
    logits = torch.full((2000,), -1.0)
    logits[[3, 50, 1999]] = 2.0
    for kept in ({"top_k": 2}, {"top_p": 0.001}, {"min_p": 1.0}):
        counts = draws(logits, 3000, **kept).bincount(minlength=2000)  # type: ignore[arg-type]
        assert counts[[3, 50, 1999]].sum() == 3000
        assert counts[[3, 50, 1999]].min() > 900


def test_tokens_repeat_for_a_seed_and_change_with_seed_and_index() -> None:
    logits = peaked(1, 1000).div(3)
    drawn = [sample(logits, [state(seed=1, index=i)]).token_ids[0] for i in range(50)]
    assert drawn == [sample(logits, [state(seed=1, index=i)]).token_ids[0] for i in range(50)]
    assert len(set(drawn)) > 30
    assert drawn != [sample(logits, [state(seed=2, index=i)]).token_ids[0] for i in range(50)]


@pytest.mark.parametrize("temperature", [1e-300, 1e-7])
def test_a_tiny_temperature_is_nearly_greedy(temperature: float) -> None:
    logits = peaked(1, 1000)
    assert set(draws(logits[0], 50, temperature=temperature).tolist()) == {int(logits.argmax())}


@pytest.mark.usefixtures("operations")
@pytest.mark.parametrize("temperature", [0, 1])
def test_rows_without_a_token_are_all_named_and_the_others_go_on(temperature: float) -> None:
    logits = peaked(6, 100)
    logits[1, 99] = torch.nan
    logits[3, 5] = torch.inf
    logits[4] = -torch.inf
    rows = [state(seed=row, temperature=temperature) for row in range(6)]
    with pytest.raises(NonFiniteLogitsError, match="1, 3, 4") as caught:
        sample(logits, rows)
    assert caught.value.rows == (1, 3, 4)
    good = [0, 2, 5]
    assert len(sample(logits[good], [rows[row] for row in good]).token_ids) == 3


@pytest.mark.usefixtures("operations")
@pytest.mark.parametrize(
    "params", [{}, {"top_k": 5}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.9}, {"min_p": 0.1}]
)
def test_masked_tokens_are_never_drawn(params: dict[str, float]) -> None:
    logits = torch.full((3000,), -torch.inf)
    logits[[7, 2500]] = torch.tensor([1.0, 1.1])
    assert set(draws(logits, 200, **params).tolist()) == {7, 2500}


def test_all_tokens_banned_is_an_error() -> None:
    with pytest.raises(NonFiniteLogitsError):
        sample(torch.zeros(1, 2), [state(banned=(0, 1))])


def test_no_rows_and_wrong_numbers_of_rows() -> None:
    assert sample(torch.zeros(0, 10), []) == Sampled([], [])
    with pytest.raises(ValueError, match=r"\(2, 10\).* 1 sampling"):
        sample(torch.zeros(2, 10), [state()])


@pytest.mark.parametrize("kind", ["inference", "grad", "strided"])
def test_any_kind_of_tensor_will_do(kind: str) -> None:
    plain = peaked(4, 600)
    rows = [state(seed=1), state(temperature=0, banned=(1,)), state(top_p=0.5), state(logprobs=2)]
    wanted = sample(plain, rows)
    if kind == "inference":
        with torch.inference_mode():
            logits = peaked(4, 600) * 1.0
    elif kind == "grad":
        logits = plain.clone().requires_grad_()
    else:
        logits = plain.t().contiguous().t()
    assert sample(logits, rows) == wanted
