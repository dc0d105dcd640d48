"""Drawing a token from logits: temperature, top_k, top_p, min_p, then one uniform number per row.

Two things make a row's token the same whatever shares its batch. Filters are thresholds on values, so
tokens with equal logits are kept or dropped together. And a token's weight is its probability relative to
the best one, rounded to a multiple of 2**-b with b = 52 - ceil(log2 V): sums of such numbers are exact in
float64, so that the order of summation doesn't matter (b is 36 for 49152 tokens).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from piecework.runner.vocab import largest, nth_equal, rows_at_a_time
from piecework.sampling import SamplingParams

# So many of the best tokens are looked at first, and _GROWTH times as many where the filters keep more.
_CANDIDATES = 1024
_GROWTH = 8
# A draw from the whole vocabulary finds a block of so many tokens first.
_BLOCK = 256
# Below this, temperature counts as this: 1 / temperature stays finite in float32.
_LOWEST_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class _Rows:
    """Logits [R,V] and what belongs to them as tensors [R,1]; top_k is V where every token is kept."""

    logits: Tensor
    best: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor

    def __getitem__(self, rows: Tensor) -> _Rows:
        return _Rows(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    @property
    def size(self) -> int:
        return self.logits.shape[-1]

    def point(self, total: Tensor) -> Tensor:
        """Return the point [R,1] below `total` [R,1] at which the cumulative weight gives the token."""
        return torch.minimum(self.uniform * total, total.nextafter(torch.zeros_like(total)))


def weights_of(logits: Tensor, best: Tensor, temperature: Tensor, vocab_size: int | None = None) -> Tensor:
    """Return exp((logits - best) / temperature) [R,K] in float32, scaled by 2**b and rounded to integers.

    `best` and `temperature` are [R,1]; b follows from `vocab_size`, which is K where it isn't given.
    """
    bits = 52 - math.ceil(math.log2(max(vocab_size or logits.shape[-1], 2)))
    return (logits - best).div_(temperature).exp_().mul_(2.0**bits).round_()


def draw(
    logits: Tensor,
    best: Tensor,
    rows: Sequence[int],
    params: Sequence[SamplingParams],
    uniforms: Sequence[float],
) -> Tensor:
    """Return [len(rows)] int64, a token for each of the named rows of logits [R,V], of any float type.

    Filters apply in the order top_k, top_p (the smallest set of the most likely tokens that reaches it,
    in what top_k left), min_p (relative to the best token). `params` and `uniforms`, numbers in [0,1), are
    given per named row; the token is where the cumulative weight exceeds the uniform. Logits may be -inf,
    but `best` [R], each row's largest one, must be finite.
    """
    device, size = logits.device, logits.shape[-1]
    tokens = torch.empty(len(rows), dtype=torch.int64, device=device)
    filtered = [0 < p.top_k < size or p.top_p < 1.0 or p.min_p > 0.0 for p in params]
    step = rows_at_a_time(logits, len(rows))
    methods: tuple[tuple[bool, Callable[[_Rows], Tensor]], ...]
    methods = ((False, _draw_from_all), (True, _draw_filtered))
    for kind, method in methods:
        chosen = [i for i, is_filtered in enumerate(filtered) if is_filtered is kind]
        for start in range(0, len(chosen), step):
            part = chosen[start : start + step]
            index = _index([rows[i] for i in part], device)
            values = logits[index].float().contiguous()
            gathered = _gather(values, best[index], [params[i] for i in part], [uniforms[i] for i in part])
            tokens[_index(part, device)] = method(gathered)
    return tokens


def _index(rows: list[int], device: torch.device) -> Tensor | slice:
    """Return what selects `rows`, ascending: a slice where that can be, since it copies nothing."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)


def _gather(logits: Tensor, best: Tensor, params: list[SamplingParams], uniforms: list[float]) -> _Rows:
    size = logits.shape[-1]

    def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).unsqueeze(-1).to(logits.device)

    return _Rows(
        logits=logits,
        best=best.unsqueeze(-1),
        temperature=column([max(p.temperature, _LOWEST_TEMPERATURE) for p in params], torch.float32),
        top_k=column([min(p.top_k, size) if p.top_k > 0 else size for p in params], torch.int64),
        top_p=column([p.top_p for p in params], torch.float64),
        min_p=column([p.min_p for p in params], torch.float32),
        uniform=column(uniforms, torch.float64),
    )


def _draw_from_all(rows: _Rows) -> Tensor:
    """Draw from the whole vocabulary in index order: first a block of tokens, then one within it."""
    weights = weights_of(rows.logits, rows.best, rows.temperature)
    if missing := -rows.size % _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, missing))
    weights = weights.view(len(weights), -1, _BLOCK)
    ends = weights.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    point = rows.point(ends[:, -1:])
    block = torch.searchsorted(ends, point, right=True)
    inside = weights.take_along_dim(block.unsqueeze(-1), dim=1).squeeze(1).double().cumsum(dim=-1)
    start = ends.gather(-1, block) - inside[:, -1:]
    place = torch.searchsorted(inside, point - start, right=True)
    return (block * _BLOCK + place).squeeze(-1)


def _draw_filtered(rows: _Rows) -> Tensor:
    """Draw from the most likely tokens, in descending order."""
    total = torch.zeros_like(rows.uniform)
    needs_total = (rows.top_p < 1.0) & (rows.top_k == rows.size)
    if (index := needs_total.squeeze(-1).nonzero().squeeze(-1)).numel():
        part = rows if len(index) == len(total) else rows[index]
        total[index] = weights_of(part.logits, part.best, part.temperature).sum(
            dim=-1, keepdim=True, dtype=torch.float64
        )
    count = min(_CANDIDATES, rows.size)
    values, ranks, covered = _draw_from_largest(rows, total, count)
    while count < rows.size and (index := (~covered).nonzero().squeeze(-1)).numel():
        count = min(count * _GROWTH, rows.size)
        again = _draw_from_largest(rows[index], total[index], count)
        values[index], ranks[index], covered[index] = again
    return nth_equal(rows.logits, values, ranks)


def _draw_from_largest(rows: _Rows, total: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw among the `count` largest logits of each row.

    Returns the drawn logit [R], its rank among equal ones [R], and whether the filters left fewer than
    `count` tokens [R], without which the draw means nothing. `total` [R,1] is the weight of the whole
    vocabulary for rows with top_p and no top_k.
    """
    values = largest(rows.logits, count)
    ascending = -values

    def at_least(limit: Tensor) -> Tensor:
        return torch.searchsorted(ascending, -limit, right=True)

    sums = weights_of(values, rows.best, rows.temperature, rows.size).double().cumsum(dim=-1)
    everything = rows.top_k == rows.size
    finite = torch.searchsorted(ascending, torch.full_like(rows.best, torch.inf))
    kept = torch.minimum(finite, at_least(values.gather(-1, (rows.top_k - 1).clamp(max=count - 1))))
    kept = torch.where(everything, finite, kept)
    complete = everything | (kept < count)
    total = torch.where(everything, total, sums.gather(-1, kept - 1))
    # top_p: the last token that stays is the first whose cumulative weight reaches the wanted share.
    last = torch.searchsorted(sums, rows.top_p * total).clamp(max=count - 1)
    nucleus = torch.where(rows.top_p < 1.0, at_least(values.gather(-1, last)), kept)
    likely = at_least(rows.best + rows.temperature * rows.min_p.log())
    kept = torch.minimum(torch.minimum(kept, nucleus), likely)
    place = torch.searchsorted(sums, rows.point(sums.gather(-1, kept - 1)), right=True)
    value = values.gather(-1, place)
    rank = place - torch.searchsorted(ascending, -value)
    covered = (complete & (kept < count)) | (count == rows.size)
    return value.squeeze(-1), rank.squeeze(-1), covered.squeeze(-1)
