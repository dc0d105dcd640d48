"""The default model gives the reference's tokens, alone and batched, and its logits in bfloat16."""

from __future__ import annotations

import pytest
import torch
from reference import compare_greedy, load_reference, nrmse

from piecework import LLM
from piecework.errors import ModelError
from piecework.native import library
from piecework.weights.source import resolve

MODEL = "smollm2-135m"
TOPICS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, in a small village",
    "Water boils at a temperature of",
    "Dear Sir or Madam,",
    "1, 2, 3, 4, 5,",
    "The three laws of thermodynamics",
    "In 1969, the first human",
    "SELECT name FROM users WHERE",
    "Photosynthesis is the process by which",
)
PROMPTS = [
    *TOPICS,
    *(f"Question: What do you know about this? {topic}\nAnswer:" for topic in TOPICS),
    *(f"{' '.join(TOPICS[i:] + TOPICS[:i])} {TOPICS[i]}" for i in range(len(TOPICS))),
]


@pytest.fixture(scope="module")
def source():
    try:
        return resolve(MODEL)
    except ModelError as error:
        pytest.skip(f"the default model can't be had here: {error}")


@pytest.fixture(scope="module")
def reference(source):
    return load_reference(source.path)


def compare(reference, texts, alone, max_tokens):
    """Run `texts` together, and every one of `alone` by itself; return the comparisons of both."""
    greedy = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
    with LLM(MODEL, dtype="float32") as llm:
        prompts = [llm.service.tokenizer.encode(text) for text in texts]
        single = [llm.service.tokenizer.encode(text) for text in alone]
        batched = [r.token_ids for r in llm.generate(prompts, **greedy)]
        one_by_one = [llm.generate([p], **greedy)[0].token_ids for p in single]
        counters = llm.service.runner.programs.counters
    assert counters.chained_runs == (counters.eager_runs if library() is not None else 0)
    # Most are equal alone and batched, and need the reference once.
    pairs = list(
        dict.fromkeys(zip(map(tuple, prompts + single), map(tuple, batched + one_by_one), strict=True))
    )
    assert all(len(output) == max_tokens for _, output in pairs)
    found = compare_greedy(reference, [prompt for prompt, _ in pairs], [output for _, output in pairs])
    print(found)
    assert not found.wrong and found.compared >= 0.9 * max_tokens * len(pairs), found


def test_it_knows_the_capital_of_japan(source):
    with LLM(MODEL) as llm:
        question = [{"role": "user", "content": "What is the capital of Japan?"}]
        (answer,) = llm.chat([question], temperature=0.0, max_tokens=24)
    assert "Tokyo" in answer.text


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "every", [pytest.param(6, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.soak)]
)
def test_greedy_tokens_of_30_prompts_equal_the_reference_alone_and_batched(reference, every):
    """Alone they read all weights for each token: most of the time of the slow tests if all of them did."""
    compare(reference, PROMPTS, PROMPTS[::every], 64)


@pytest.mark.slow
def test_bfloat16_logits_are_close(source, reference):
    with LLM(MODEL, dtype="bfloat16") as llm:
        ids = llm.service.tokenizer.encode(PROMPTS[-1])
        model = llm.service._engine._runner.programs.model
        with torch.inference_mode():
            positions = torch.arange(len(ids))
            got = model.head(model(torch.tensor(ids), positions))
            expected = reference(torch.tensor([ids])).logits[0]
    assert nrmse(got, expected) < 2e-2
