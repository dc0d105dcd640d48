"""Draws follow the distribution that the filters of transformers leave."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from sampling_states import draws, peaked
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from piecework.runner import nucleus
from piecework.runner.random import uniform

COUNT = 20000


def reference(
    logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Probabilities [V] after transformers' filters, in the same order."""
    steps: list[Any] = []
    if temperature != 1.0:
        steps.append(TemperatureLogitsWarper(temperature))
    if top_k > 0:
        steps.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        steps.append(TopPLogitsWarper(top_p))
    if min_p > 0.0:
        steps.append(MinPLogitsWarper(min_p))
    scores = logits.double().unsqueeze(0)
    for step in steps:
        scores = step(None, scores)
    return scores.softmax(dim=-1)[0]


def assert_follows(drawn: Tensor, probabilities: Tensor) -> None:
    """Chi-square test at five standard deviations, with rare tokens pooled."""
    counts = drawn.bincount(minlength=len(probabilities)).double()
    assert counts[probabilities == 0].sum() == 0, "a token was drawn that the filters exclude"
    order = probabilities.argsort(descending=True)
    expected, observed = [0.0], [0.0]
    for p, c in zip(probabilities[order].tolist(), counts[order].tolist(), strict=True):
        if expected[-1] >= 10:
            expected.append(0.0)
            observed.append(0.0)
        expected[-1] += p * len(drawn)
        observed[-1] += c
    if len(expected) > 1 and expected[-1] < 10:
        for counted in (expected, observed):
            rest = counted.pop()
            counted[-1] += rest
    freedom = len(expected) - 1
    if freedom == 0:
        return
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    # Wilson and Hilferty: the cube root of a chi-square variable is nearly normal.
    spread = 2 / (9 * freedom)
    assert ((statistic / freedom) ** (1 / 3) - 1 + spread) / math.sqrt(spread) < 5


COMBINATIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.8},
    {"top_k": 7},
    {"top_k": 1},
    {"top_p": 0.8},
    {"top_p": 0.05},
    {"min_p": 0.1},
    {"temperature": 0.5, "min_p": 0.1},
    {"temperature": 1.6, "min_p": 0.1},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.5, "top_k": 30, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 0.8, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("params", COMBINATIONS, ids=str)
def test_a_small_vocabulary(params: dict[str, Any]) -> None:
    logits = peaked(1, 60, seed=1)[0] / 2
    assert_follows(draws(logits, COUNT, **params), reference(logits, **params))


@pytest.mark.parametrize(
    "params",
    [
        *({"top_k": 1300, "top_p": 0.9}, {"min_p": 0.001}, {"top_p": 0.3}),
        *(pytest.param(p, marks=pytest.mark.slow) for p in ({}, {"top_p": 0.97}, {"top_k": 1500})),
    ],
    ids=str,
)
def test_more_tokens_than_are_looked_at_first(params: dict[str, Any]) -> None:
    logits = peaked(1, 3000, seed=2)[0] / 3
    assert_follows(draws(logits, COUNT // 4, **params), reference(logits, **params))


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.99, 0.9999])
@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
def test_the_first_look_gives_the_same_token_as_a_full_sort(
    monkeypatch: pytest.MonkeyPatch, top_p: float, spread: float
) -> None:
    logits = peaked(1, 5000, seed=3)[0] * spread
    drawn = {}
    for candidates in (16, 1024, 5000):
        monkeypatch.setattr(nucleus, "_CANDIDATES", candidates)
        drawn[candidates] = draws(logits, 64, top_p=top_p)
    for one, other in pairwise(drawn.values()):
        assert torch.equal(one, other)


def test_the_whole_vocabulary_is_walked_in_order_of_ids() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, -4.0]).repeat(500)
    probabilities = logits.double().softmax(dim=-1)
    ends = probabilities.cumsum(dim=-1)
    drawn = draws(logits, 200)
    for seed, token in enumerate(drawn.tolist()):
        point = uniform(seed, 3)
        assert float(ends[token] - probabilities[token]) - 1e-6 <= point <= float(ends[token]) + 1e-6


@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 1000])
def test_any_size_of_vocabulary(size: int) -> None:
    logits = torch.zeros(size)
    for params in ({}, {"top_p": 0.999999}, {"top_k": size + 1}):
        drawn = draws(logits, 2000, **params)  # type: ignore[arg-type]
        assert set(drawn.tolist()) <= set(range(size))
        assert_follows(drawn, torch.full((size,), 1 / size, dtype=torch.float64))


@pytest.mark.parametrize("size", [7, 4096, 49152, 151936])
def test_sums_of_weights_are_exact_in_any_order(size: int) -> None:
    logits = peaked(1, size, seed=4)
    weights = nucleus.weights_of(logits, logits.amax(dim=-1, keepdim=True), torch.tensor([[1.7]])).double()
    assert torch.equal(weights, weights.round())
    assert size * float(weights.max()) <= 2**53
    assert float(weights.cumsum(dim=-1)[0, -1]) == math.fsum(weights[0].tolist())
    assert (weights / weights.sum()).sub(logits.double().div(1.7).softmax(dim=-1)).abs().max() < 1e-6
