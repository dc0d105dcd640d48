"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168): prompts, and the number that an answer comes to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from piecework.errors import ConfigError
from piecework.eval.data import read_lines, refused, text_field
from piecework.eval.options import Gsm8kOptions

STOP = ("Question:",)
"""A model that goes on would ask itself the next question."""
DEFAULT_QUESTIONS = 200
_MARK = "####"
# A sign, digits with or without commas between, and a fraction.
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Question:
    """A prompt, and the number that is right."""

    prompt: str
    answer: Decimal


def answer_value(text: str) -> Decimal | None:
    """Return the number that an answer comes to; None where it has none, which makes it invalid.

    The data set puts it behind "####". Where a model does not, it is the last number of its text, as
    in SGLang's and the lm-evaluation-harness's flexible reading.
    """
    _, mark, behind = text.partition(_MARK)
    marked = _NUMBER.search(behind) if mark else None
    found = marked.group() if marked else (_NUMBER.findall(text) or [None])[-1]
    return None if found is None else Decimal(found.replace(",", ""))


def read_questions(options: Gsm8kOptions) -> list[Question]:
    """Return the questions to ask, each behind the solved examples.

    Examples come from `options.train`, or from the head of `options.data`; those are not asked. Raises
    ConfigError where a line can't be used (with its number) or a file has too few.
    """
    items = _items("data", options.data)
    shots = _items("train", options.train) if options.train is not None else items
    if len(shots) < options.num_shots:
        raise ConfigError("num_shots", options.num_shots, f"at most {len(shots)}, the examples in the file")
    asked = items if options.train is not None else items[options.num_shots :]
    if not asked:
        raise ConfigError(
            "num_shots", options.num_shots, f"less than {len(items)}, so that a question is left"
        )
    count = min(DEFAULT_QUESTIONS, len(asked)) if options.num_questions is None else options.num_questions
    if not 0 < count <= len(asked):
        allowed = f"1 to {len(asked)}, the questions in the file that are not examples"
        raise ConfigError("num_questions", count, allowed)
    head = "".join(
        f"{_question(question)} {answer}\n\n" for question, answer, _ in shots[: options.num_shots]
    )
    return [Question(head + _question(question), value) for question, _, value in asked[:count]]


def _question(question: str) -> str:
    return f"Question: {question}\nAnswer:"


def _items(field: str, path: str) -> Sequence[tuple[str, str, Decimal]]:
    found = []
    for number, item in read_lines(field, path):
        question = text_field(field, path, number, item, "question")
        answer = text_field(field, path, number, item, "answer")
        value = answer_value(answer)
        if value is None:
            raise refused(field, path, number, "its answer holds no number")
        found.append((question, answer, value))
    return found
