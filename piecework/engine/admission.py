"""What a request must satisfy before it is queued, and the sequences it becomes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from piecework.engine.request import Listener, Request
from piecework.errors import RequestError
from piecework.kvcache import Capacities
from piecework.models.config import ModelConfig
from piecework.runner.random import sub_seed
from piecework.sampling import SamplingParams
from piecework.tokenizer.detokenize import Detokenizer
from piecework.tokenizer.tokenizer import Tokenizer


class Admission:
    """Checks requests against the model's limits. `max_model_len` tokens fit the context and the KV cache.

    `capacities` are those of a static cache.
    """

    def __init__(
        self,
        model: ModelConfig,
        tokenizer: Tokenizer | None,
        eos_ids: Sequence[int],
        max_model_len: int,
        capacities: Capacities | None = None,
    ) -> None:
        self._vocab_size = model.vocab_size
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(eos_ids)
        self._max_model_len = max_model_len
        self._limit = f"the context is {max_model_len} tokens"
        if capacities is not None and max_model_len == capacities.longest:
            self._limit = (
                f"the largest of kv_capacities is {capacities.largest} tokens, for those of the prompt and "
                f"all but the last of the answer, a context of {max_model_len}"
            )

    def requests(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        seed: int,
        listener: Listener,
    ) -> list[Request]:
        """Return one request per sample; raise RequestError naming the field where something is wrong."""
        ids = self._checked_prompt(prompt_ids)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", params.logit_bias)
        if params.stop and self._tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this model has none", param="stop")
        max_tokens = self._max_tokens(len(ids), params)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids)
        if params.min_tokens and len(stop_ids) == self._vocab_size:
            message = f"min_tokens={params.min_tokens} is not allowed: every token would end the request"
            raise RequestError(message, param="min_tokens")
        return [
            Request(
                request_id=request_id,
                index=index,
                prompt_ids=ids,
                params=params,
                seed=sub_seed(seed, index),
                max_tokens=max_tokens,
                stop_ids=stop_ids,
                listener=listener,
                detokenizer=self._detokenizer(ids, params),
            )
            for index in range(params.n)
        ]

    def _checked_prompt(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        ids = tuple(prompt_ids)
        if not ids:
            raise RequestError("prompt is empty: at least one token is needed", param="prompt")
        self._check_ids("prompt", ids)
        if len(ids) >= self._max_model_len:
            raise RequestError(
                f"prompt has {len(ids)} tokens, but at most {self._max_model_len - 1} fit: "
                f"{self._limit} and one is needed for the answer",
                param="prompt",
                code="context_length_exceeded",
            )
        return ids

    def _check_ids(self, param: str, ids: Iterable[int]) -> None:
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self._vocab_size:
                raise RequestError(
                    f"{param} has the token id {token!r}; allowed are integers from 0 to "
                    f"{self._vocab_size - 1}",
                    param=param,
                )

    def _max_tokens(self, prompt_length: int, params: SamplingParams) -> int:
        room = self._max_model_len - prompt_length
        if params.max_tokens is None:
            return room
        if params.max_tokens > room:
            raise RequestError(
                f"max_tokens={params.max_tokens} is not allowed: the prompt has {prompt_length} tokens and "
                f"{self._limit}, which leaves {room}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return params.max_tokens

    def _detokenizer(self, prompt_ids: Sequence[int], params: SamplingParams) -> Detokenizer | None:
        if self._tokenizer is None:
            return None
        return Detokenizer(
            self._tokenizer,
            prompt_ids,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )
