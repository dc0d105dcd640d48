"""Prompts for benchmarks: random ones of a wanted length, and conversations from a ShareGPT-style file."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from piecework.errors import ConfigError
from piecework.json_text import parse_json

CountTokens = Callable[[str], int]
DEFAULT_OUTPUT_LEN = 128
# As in vLLM's and SGLang's benchmarks: very short and very long conversations say little.
_SHAREGPT_MIN_TOKENS = 4
_SHAREGPT_MAX_PROMPT = 1024
_SHAREGPT_MAX_TOTAL = 2048

# Common English words, most of which are one token each in any vocabulary.
_WORDS = tuple(
    """time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work number night point home
water room mother area money story fact month lot right study book eye job word business issue side kind
head house service friend father power hour game line end member law car city community name president
team minute idea body information back parent face others level office door health person art war history
party result change morning reason research girl guy moment air teacher force education""".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class BenchRequest:
    """One prompt and how many tokens it is to be given."""

    prompt: str
    output_len: int


def words_tokens(text: str) -> int:
    """Count words, in place of tokens where there is no tokenizer."""
    return len(text.split())


def random_lengths(count: int, mean: int, ratio: float, rng: random.Random) -> list[int]:
    """Return `count` lengths, uniform between mean * (1 - ratio) and mean * (1 + ratio), at least 1."""
    low, high = round(mean * (1 - ratio)), round(mean * (1 + ratio))
    return [max(1, rng.randint(low, high)) for _ in range(count)]


def random_prompt(length: int, rng: random.Random, count_tokens: CountTokens) -> str:
    """Return as many random words as fit into `length` tokens, and at least one."""
    words = rng.choices(_WORDS, k=length)
    if count_tokens(" ".join(words)) <= length:
        return " ".join(words)
    fit = bisect_right(range(1, length), length, key=lambda n: count_tokens(" ".join(words[:n])))
    return " ".join(words[: max(1, fit)])


def random_requests(
    count: int, input_len: int, output_len: int | None, ratio: float, seed: int, count_tokens: CountTokens
) -> list[BenchRequest]:
    """Return `count` random requests; the same seed gives the same ones."""
    rng = random.Random(seed)
    inputs = random_lengths(count, input_len, ratio, rng)
    outputs = random_lengths(count, output_len or DEFAULT_OUTPUT_LEN, ratio, rng)
    return [
        BenchRequest(random_prompt(i, rng, count_tokens), o) for i, o in zip(inputs, outputs, strict=True)
    ]


def sharegpt_requests(
    path: str, count: int, output_len: int | None, seed: int, count_tokens: CountTokens
) -> list[BenchRequest]:
    """Return `count` first turns of a file's conversations in random order, repeated where it has fewer.

    The file is a JSON list of `{"conversations": [{"value": question}, {"value": answer}, ...]}`; the
    answer's length is how many tokens are asked for, unless `output_len` says it.
    """
    found = []
    for number, entry in enumerate(_load(path)):
        try:
            turns = entry["conversations"]
            if len(turns) >= 2:
                found.append((str(turns[0]["value"]), str(turns[1]["value"])))
        except (KeyError, TypeError) as error:
            wanted = 'a list of {"conversations": [{"value": ...}, ...]}'
            raise ConfigError("dataset_path", path, f"{wanted}; entry {number} is not") from error
    random.Random(seed).shuffle(found)
    requests: list[BenchRequest] = []
    for question, answer in found:
        prompt, output = count_tokens(question), output_len or count_tokens(answer)
        short = min(prompt, output) < _SHAREGPT_MIN_TOKENS and output_len is None
        if not short and prompt <= _SHAREGPT_MAX_PROMPT and prompt + output <= _SHAREGPT_MAX_TOTAL:
            requests.append(BenchRequest(question, output))
        if len(requests) == count:
            break
    if not requests:
        raise ConfigError("dataset_path", path, "a file with a conversation of usable length")
    return [requests[i % len(requests)] for i in range(count)]


def _load(path: str) -> list[Any]:
    try:
        loaded = parse_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("dataset_path", path, f"a readable JSON file ({error})") from error
    if not isinstance(loaded, list):
        raise ConfigError("dataset_path", path, "a JSON file with a list at the top")
    return loaded
