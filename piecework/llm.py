"""The offline API: `LLM(model).generate(prompts)`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from piecework.config import EngineConfig
from piecework.engine.data_parallel import make_service
from piecework.engine.offline import run_requests
from piecework.engine.outputs import Delta
from piecework.engine.resize import KVSize
from piecework.engine.result import Result
from piecework.errors import RequestError
from piecework.sampling import SamplingParams
from piecework.tokenizer.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
ParamsOfEach = SamplingParams | Sequence[SamplingParams] | None
"""Of all prompts, of each one, or None for the model's own."""


class LLM:
    """A model in this process. Settings are the names of `EngineConfig`'s leaves.

        llm = LLM("smollm2-135m", dtype="float32")
        print(llm.generate("The capital of France is", max_tokens=8)[0].text)

    Close it, or use it in a `with` statement, to stop its engine thread.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        if model is not None:
            settings["model"] = model
        self.service = make_service(EngineConfig.from_flat(settings))

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: ParamsOfEach = None, **changes: Any
    ) -> list[Result]:
        """Complete each prompt (a text or a list of token ids) and return the results in order.

        With n > 1 a prompt's samples follow each other. `params` are for all prompts or, in a list, one for
        each, and default to the model's own; `changes` are single fields of them all. Raises RequestError
        where a prompt or a field can't be used; a request that fails later has `finish_reason` "error" and
        says why in `error`.
        """
        return self._run([self._encode(p) for p in _as_list(prompts)], params, changes)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: ParamsOfEach = None,
        **changes: Any,
    ) -> list[Result]:
        """Answer each conversation, a list of messages with `role` and `content`; see `generate`."""
        single = bool(conversations) and isinstance(conversations[0], Mapping)
        many: Any = [conversations] if single else conversations
        tokenizer = self._tokenizer()
        return self._run([tokenizer.encode_chat(list(c)) for c in many], params, changes)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **changes: Any) -> Iterator[Delta]:
        """Complete one prompt and yield its deltas as they come; closing the iterator aborts it."""
        chosen = self._params(params, changes)
        for _, delta in run_requests(self.service, [self._encode(prompt)], chosen):
            yield delta

    def resize_kv(self, pages: int) -> KVSize:
        """Give the KV cache `pages` pages while requests run; see `Service.resize_kv`."""
        return self.service.resize_kv(pages)

    def move_to(self, device: str) -> None:
        """Go on with another device of the list while requests run; see `Service.move_to`."""
        self.service.move_to(device)

    def close(self) -> None:
        """Stop the engine; what still runs ends as aborted."""
        self.service.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self, prompts: Sequence[Sequence[int]], params: ParamsOfEach, changes: Mapping[str, Any]
    ) -> list[Result]:
        each = self._params_of_each(len(prompts), params, changes)
        results = [[Result(index=i) for i in range(own.n)] for own in each]
        for number, delta in run_requests(self.service, prompts, each):
            results[number][delta.index].add(delta)
        return [sample for samples in results for sample in samples]

    def _params_of_each(
        self, prompts: int, params: ParamsOfEach, changes: Mapping[str, Any]
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [self._params(params, changes)] * prompts
        if not isinstance(params, list | tuple):
            raise _not_params(params, ", or a list of them")
        if len(params) != prompts:
            message = f"params has {len(params)} entries, and there are {prompts} prompts: one for each"
            raise RequestError(message, param="params")
        return [self._params(one, changes) for one in params]

    def _params(self, params: SamplingParams | None, changes: Mapping[str, Any]) -> SamplingParams:
        if params is not None and not isinstance(params, SamplingParams):
            raise _not_params(params)
        return (params or self.service.default_params).with_changes(**changes)

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, str):
            return self._tokenizer().encode(prompt)
        ids: Any = prompt
        if isinstance(ids, bytes) or not isinstance(ids, Sequence):
            raise RequestError(
                f"prompt={prompt!r} is not allowed: a text or a list of token ids", param="prompt"
            )
        return prompt

    def _tokenizer(self) -> Tokenizer:
        if self.service.tokenizer is None:
            raise RequestError("this model has no tokenizer: give prompts as token ids", param="prompt")
        return self.service.tokenizer


def _not_params(params: Any, more: str = "") -> RequestError:
    return RequestError(f"params={params!r} is not allowed: SamplingParams{more}", param="params")


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):
        return [prompts]
    flat = bool(prompts) and all(isinstance(p, int) for p in prompts)
    return [prompts] if flat else prompts  # type: ignore[list-item, return-value]
