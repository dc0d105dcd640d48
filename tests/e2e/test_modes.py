"""Every graph mode that a device has gives the tokens and prompt log probabilities of the eager engine."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from shrinking_batches import CAPTURED, PREFILLS, generate
from tiny import save_tiny

from piecework import LLM
from piecework.errors import ModelError
from piecework.weights.source import resolve

NEAR_TIE = 2e-3


@dataclass(frozen=True)
class Mode:
    """A device and what its programs are made like."""

    device: str
    decode: str = "eager"
    prefill: str = "eager"
    compiler: str = "eager"

    @property
    def captures(self) -> bool:
        """Whether any step is a replay."""
        return (self.decode, self.prefill) != ("eager", "eager")

    def settings(self) -> dict[str, object]:
        """Keyword arguments of LLM."""
        config: dict[str, object] = {
            "compiler": self.compiler,
            "decode_graph": self.decode,
            "prefill_graph": self.prefill,
        }
        if self.captures:
            config |= {"decode_capture_sizes": CAPTURED, "prefill_capture_sizes": PREFILLS}
        return {"device": self.device, "compilation_config": config}


MODES = [
    Mode("sim", "piecewise", "piecewise"),
    Mode("sim", "full", "eager"),
    Mode("sim:host", "full", "piecewise"),
    Mode("sim"),
]
INDUCTOR = [Mode("cpu", compiler="inductor"), Mode("sim", "full", "piecewise", "inductor")]


def run(model: str, mode: Mode, vocabulary: int, max_tokens: int):
    """Greedy results of batches of each size, with the best two log probabilities of each token."""
    with LLM(
        model,
        dtype="float32",
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=192,
        kv_cache_memory=2**26,
        **mode.settings(),
    ) as llm:
        results = generate(llm, vocabulary, max_tokens, logprobs=2, prompt_logprobs=1)
        counters = llm.service.runner.programs.counters
        layers = llm.service.model_config.num_layers
    assert (counters.pieces, counters.holes, counters.traces) == (layers + 1, layers, 1)
    assert counters.recompiles == counters.compile_failures == 0
    assert (counters.replays > 0) == mode.captures and counters.eager_runs > 0
    if mode.decode == "full":
        assert counters.captures >= len(CAPTURED)
    return results


def check_equal(expected, found) -> None:
    """Same tokens, but for flips at near ties; prompt log probabilities within float32's reach."""
    flips = 0
    for want, got in zip(expected, found, strict=True):
        assert got.finish_reason == "length", got.error
        for a, b in zip(want.prompt_logprobs[1:], got.prompt_logprobs[1:], strict=True):
            assert a.token_id == b.token_id and abs(a.logprob - b.logprob) < 1e-3
        for entry, token in zip(want.logprobs, got.token_ids, strict=True):
            if entry.token_id != token:
                assert entry.top[0][1] - entry.top[1][1] < NEAR_TIE
                flips += 1
                break
    assert flips <= len(found) // 4


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("moe"), "qwen3_moe"))


@pytest.fixture(scope="module")
def expected(moe):
    return run(moe, Mode("cpu"), 320, 12)


@pytest.mark.parametrize(
    "mode", [*MODES, *(pytest.param(m, marks=pytest.mark.slow) for m in INDUCTOR)], ids=str
)
def test_a_mixture_of_experts(moe, expected, mode):
    check_equal(expected, run(moe, mode, 320, 12))


@pytest.fixture(scope="module")
def default_expected():
    try:
        resolve("smollm2-135m")
    except ModelError as error:
        pytest.skip(f"the default model can't be had here: {error}")
    return run("smollm2-135m", Mode("cpu"), 49152, 64)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_the_default_model(default_expected, mode):
    check_equal(default_expected, run("smollm2-135m", mode, 49152, 64))
