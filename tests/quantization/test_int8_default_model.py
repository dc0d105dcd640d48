"""The default model in int8: sensible text, and logits near those of the float model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from reference import nrmse

from piecework import LLM
from piecework.cli.main import main
from piecework.errors import ModelError
from piecework.weights.source import resolve

MODEL = "smollm2-135m"
TEXT = (
    "Photosynthesis is the process by which plants use sunlight, water and carbon dioxide to create oxygen "
    "and energy in the form of sugar. The capital of France is Paris, and that of Italy is Rome."
)
OTHER_TEXTS = [
    "Mia has 12 apples and gives a third of them to her brother. How many are left? 12 - 4 = 8.",
    "def mean(values):\n    return sum(values) / len(values)\n\nprint(mean([1, 2, 3]))",
    "Once upon a time a fox lived at the edge of a dark forest, and every night it came down to the village.",
]
QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]
# NRMSE of the logits against float32: 0.4% and 1.8% were seen. Rounding every linear's input
# to 8 bits per token adds more in this model, some of whose tokens have one huge channel.
BOUNDS = {"w8": 1e-2, "w8a8-dynamic": 3e-2}


@pytest.fixture(scope="module")
def source() -> Path:
    try:
        return resolve(MODEL).path
    except ModelError as error:
        pytest.skip(f"the default model can't be had here: {error}")


def answer_and_logits(model: str, **settings: object) -> tuple[str, torch.Tensor]:
    """The greedy answer to the question, and the logits of TEXT."""
    with LLM(model, dtype="float32", max_model_len=512, kv_cache_memory=2**26, **settings) as llm:
        (answer,) = llm.chat([QUESTION], temperature=0.0, max_tokens=24)
        ids = llm.service.tokenizer.encode(TEXT)
        module = llm.service.runner.programs.model
        with torch.inference_mode():
            return answer.text, module.head(module(torch.tensor(ids), torch.arange(len(ids))))


@pytest.fixture(scope="module")
def expected(source: Path) -> torch.Tensor:
    return answer_and_logits(MODEL)[1]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", list(BOUNDS))
def test_it_answers_and_its_logits_are_near(expected: torch.Tensor, scheme: str) -> None:
    text, found = answer_and_logits(MODEL, quantization=scheme)
    error = nrmse(found, expected)
    print(f"{scheme}: NRMSE of the logits {error:.2e}, answer {text!r}")
    assert "Tokyo" in text and 0 < error < BOUNDS[scheme]


@pytest.mark.slow
def test_the_offline_file_of_a_gguf_gives_the_same_logits(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["quantize", MODEL, str(out), "--scheme", "w8a8-dynamic", "--dtype", "float32"]
    assert main(command) == 0
    text, found = answer_and_logits(str(out))
    on_load, expected = answer_and_logits(MODEL, quantization="w8a8-dynamic")
    assert text == on_load and torch.equal(found, expected)


def divergence(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Mean Kullback-Leibler divergence of a token's distribution, in nats."""
    p, q = expected.log_softmax(-1), found.log_softmax(-1)
    return float(torch.nn.functional.kl_div(q, p, reduction="batchmean", log_target=True))


@pytest.mark.slow
def test_smoothing_saves_much_of_what_int8_costs(expected: torch.Tensor, tmp_path: Path) -> None:
    """Calibrated on other texts. 6.2% and 4.0% were seen, over few tokens."""
    texts, out = tmp_path / "texts.txt", tmp_path / "out"
    texts.write_text("\n\n".join(OTHER_TEXTS))
    command = ["quantize", MODEL, str(out), "--scheme", "w8a8-dynamic", "--calibration", str(texts)]
    assert main([*command, "--dtype", "float32"]) == 0
    smoothed = divergence(answer_and_logits(str(out))[1], expected)
    plain = divergence(answer_and_logits(MODEL, quantization="w8a8-dynamic")[1], expected)
    print(f"divergence: plain {plain:.2%}, smoothed {smoothed:.2%}")
    assert 0 < smoothed < 0.75 * plain
