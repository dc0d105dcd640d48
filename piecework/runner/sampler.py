"""From logits to tokens. A token is a function of (seed, index, logits); there is no generator state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from piecework.errors import PieceworkError
from piecework.runner import vocab
from piecework.runner.nucleus import draw
from piecework.runner.penalties import edit, needs_edit
from piecework.runner.random import uniform
from piecework.sampling import LOWEST_LOGPROB, SamplingParams, TokenLogprob

# Other devices may lack float64 or a sorted search: their logits are copied to the host first.
_SAMPLING_DEVICES = ("cpu", "cuda")
# Log probabilities take a float32 copy of their rows; this many at a time bound it.
_LOGPROB_ROWS = 32


class NonFiniteLogitsError(PieceworkError):
    """Rows from which no token can be chosen: NaN or +inf among the logits, or every token at -inf."""

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = tuple(rows)
        named = ", ".join(map(str, self.rows))
        super().__init__(f"no token can be chosen in row {named}: NaN, +inf or only -inf in its logits")


@dataclass(slots=True)
class SamplingState:
    """What the next token of one sequence depends on, besides its logits.

    `index` counts the sequence's output tokens, and together with `seed` gives the random number.
    `banned_ids` can't be chosen now (end tokens until min_tokens are there). `prompt_ids` and
    `output_ids` are read only for penalties; numpy arrays are read without a copy. Nobody changes a state;
    it isn't frozen since that takes five times as long to make, for every token.
    """

    params: SamplingParams
    seed: int
    index: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    banned_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sampled:
    """A token per row, and its log probability where the row's parameters ask for it."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]


def sample(logits: Tensor, states: Sequence[SamplingState]) -> Sampled:
    """Choose a token for each row of logits [R,V], of any float type; `states[r]` belongs to row r.

    Steps: logit_bias, banned ids, repetition, presence and frequency penalty; then the largest logit
    (the lowest id among equals) where temperature is 0, else temperature, top_k, top_p, min_p and a draw.
    The result for a row doesn't depend on the other rows. `logits` is not changed.

    Log probabilities are those of the model: the log-softmax of the raw logits, before any of these steps.

    Raises:
        ValueError: the number of states is not the number of rows.
        NonFiniteLogitsError: some rows give no token; `rows` names them all. The others can be sampled
            again without them, and get what they would have got.
    """
    if logits.dim() != 2 or logits.shape[0] != len(states):
        raise ValueError(f"logits of shape {tuple(logits.shape)} do not fit {len(states)} sampling states")
    if not states:
        return Sampled([], [])
    logits = _usable(logits)
    token_ids, bad = _choose(logits, states)
    if bad:
        raise NonFiniteLogitsError(bad)
    return Sampled(token_ids, _sampled_logprobs(logits, token_ids, states))


def _choose(logits: Tensor, states: Sequence[SamplingState]) -> tuple[list[int], list[int]]:
    """Return a token for each row of logits [R,V], or none at all and the rows that have none.

    Only rows that are edited are copied, and only those that are drawn are looked at more than once.
    """
    best, tokens = vocab.best(logits)
    edited = {row: i for i, row in enumerate(r for r, state in enumerate(states) if needs_edit(state))}
    sources: list[tuple[Tensor, Tensor, Mapping[int, int] | range]] = [(logits, best, range(len(states)))]
    if edited:
        index = torch.tensor(list(edited), device=logits.device)
        own = logits[index].float().contiguous()
        edit(own, range(len(edited)), [states[row] for row in edited])
        best[index], tokens[index] = found = vocab.best(own)
        sources.append((own, found[0], edited))
    if bad := [row for row, value in enumerate(best.tolist()) if not isfinite(value)]:
        return [], bad
    random = [row for row, state in enumerate(states) if not state.params.greedy]
    for (values, top, places), changed in zip(sources, (False, True), strict=False):
        rows = [row for row in random if (row in edited) is changed]
        if rows:
            chosen = [states[row] for row in rows]
            uniforms = [uniform(state.seed, state.index) for state in chosen]
            numbers = [places[row] for row in rows]
            drawn = draw(values, top, numbers, [state.params for state in chosen], uniforms)
            tokens[torch.tensor(rows, device=tokens.device)] = drawn
    token_ids: list[int] = tokens.tolist()
    return token_ids, []


def prompt_logprobs(logits: Tensor, targets: Sequence[int], top: int) -> list[TokenLogprob]:
    """Return the log probability of `targets[r]` under row r of logits [R,V], with the `top` best tokens.

    Raises:
        ValueError: the number of targets is not the number of rows.
        NonFiniteLogitsError: rows with NaN or +inf, or with nothing but -inf.
    """
    if logits.dim() != 2 or logits.shape[0] != len(targets):
        raise ValueError(f"logits of shape {tuple(logits.shape)} do not fit {len(targets)} targets")
    return _logprobs(_usable(logits), range(len(targets)), targets, [top] * len(targets))


def _usable(logits: Tensor) -> Tensor:
    logits = logits.detach()
    return logits if logits.device.type in _SAMPLING_DEVICES else logits.cpu()


def _sampled_logprobs(
    logits: Tensor, token_ids: list[int], states: Sequence[SamplingState]
) -> list[TokenLogprob | None]:
    found: list[TokenLogprob | None] = [None] * len(states)
    tops = {row: top for row, state in enumerate(states) if (top := state.params.logprobs) is not None}
    if tops:
        rows = list(tops)
        entries = _logprobs(logits, rows, [token_ids[row] for row in rows], list(tops.values()))
        for row, entry in zip(rows, entries, strict=True):
            found[row] = entry
    return found


def _logprobs(
    logits: Tensor, rows: Sequence[int], targets: Sequence[int], tops: Sequence[int]
) -> list[TokenLogprob]:
    """Return an entry per row named; equal log probabilities rank by token id."""
    entries: list[TokenLogprob] = []
    for start in range(0, len(rows), _LOGPROB_ROWS):
        part = slice(start, start + _LOGPROB_ROWS)
        index = torch.tensor(rows[part], device=logits.device)
        values = logits[index].float().log_softmax(dim=-1)
        bad = [rows[start + i] for i, nan in enumerate(values[:, 0].isnan().tolist()) if nan]
        if bad:
            raise NonFiniteLogitsError(bad)
        chosen = values.gather(-1, torch.tensor(targets[part], device=logits.device).unsqueeze(-1))
        count = min(max(tops[part]), values.shape[-1])
        best = vocab.ranked(values, count) if count else values.new_zeros((len(index), 0), dtype=torch.int64)
        scores = values.gather(-1, best).clamp(min=LOWEST_LOGPROB).tolist()
        first = chosen.squeeze(-1).clamp(min=LOWEST_LOGPROB).tolist()
        for token, score, ids, numbers, top in zip(
            targets[part], first, best.tolist(), scores, tops[part], strict=True
        ):
            pairs = tuple(zip(ids[:top], numbers[:top], strict=True))
            entries.append(TokenLogprob(token, score, pairs))
    return entries
