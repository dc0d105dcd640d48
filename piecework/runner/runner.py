"""The runner: a model's weights and KV cache on one device, and how a step runs there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from piecework.devices import Device
from piecework.kvcache import AttentionMetadata, PagedKVCache
from piecework.models.decoder import CausalLM
from piecework.profile import Profile
from piecework.runner.attention import PagedAttention
from piecework.runner.batch import BatchItem, ItemResult, build_inputs
from piecework.runner.sampler import NonFiniteLogitsError, SamplingState, prompt_logprobs, sample
from piecework.sampling import TokenLogprob

# The head runs on this many prompt rows at a time, since each row gives a vocabulary of floats.
_HEAD_ROWS = 128


class Runner:
    """Owns model and cache on `device`, and executes batches. One slice of rows per item, in order."""

    def __init__(self, model: CausalLM, cache: PagedKVCache, device: Device, profile: Profile) -> None:
        self.model = model
        self.cache = cache
        self.device = device
        self.profile = profile
        self._attention = PagedAttention(model.attention_specs, cache, device.op_order)
        self._metadata: AttentionMetadata | None = None
        model.bind_attention(self._fill)

    def _fill(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        assert self._metadata is not None, "attention is only filled inside execute()"
        self._attention(layer, q, k, v, out, self._metadata)

    @torch.inference_mode()
    def execute(self, items: Sequence[BatchItem]) -> list[ItemResult]:
        """Run one step; the result has an entry per item, in the same order."""
        decoding = all(item.span.length == 1 for item in items)
        phase = "decode" if decoding else "prefill"
        with self.profile.time(f"{phase}.prepare"):
            inputs = build_inputs(items, self.cache.page_size, self.device.torch_device)
        with self.profile.time(f"{phase}.run"):
            self._metadata = inputs.metadata
            try:
                hidden = self.model(inputs.input_ids, inputs.positions)
            finally:
                self._metadata = None
            drawing = [i for i, item in enumerate(items) if item.sampling is not None]
            last = [inputs.rows[i].stop - 1 for i in drawing]
            logits = self.model.head(hidden[last]) if last else None
            self.device.synchronize()
        with self.profile.time(f"{phase}.sample"):
            results = [ItemResult() for _ in items]
            if logits is not None:
                states = [state for item in items if (state := item.sampling) is not None]
                for i, result in zip(drawing, draw(logits, states), strict=True):
                    results[i] = result
            for i, item in enumerate(items):
                if item.prompt_targets:
                    rows = hidden[inputs.rows[i].slice][: len(item.prompt_targets)]
                    scored = self._score(rows, item.prompt_targets, item.prompt_top)
                    results[i] = ItemResult(results[i].token_id, results[i].logprob, scored, results[i].error)
        return results

    def _score(self, rows: Tensor, targets: Sequence[int], top: int) -> list[TokenLogprob]:
        scored: list[TokenLogprob] = []
        for start in range(0, len(targets), _HEAD_ROWS):
            part = slice(start, start + _HEAD_ROWS)
            scored += prompt_logprobs(self.model.head(rows[part]), list(targets[part]), top)
        return scored


def draw(logits: Tensor, states: Sequence[SamplingState]) -> list[ItemResult]:
    """Draw a token per row of logits [R, V]; a row that isn't finite gets an error, the others go on."""
    bad: dict[int, str] = {}
    try:
        sampled = sample(logits, states)
    except NonFiniteLogitsError as error:
        bad = dict.fromkeys(error.rows, f"the model's logits are not finite ({error})")
        good = [row for row in range(len(states)) if row not in bad]
        sampled = sample(logits[good], [states[row] for row in good])
    drawn = iter(zip(sampled.token_ids, sampled.logprobs, strict=True))
    return [
        ItemResult(error=bad[row]) if row in bad else ItemResult(*next(drawn)) for row in range(len(states))
    ]
