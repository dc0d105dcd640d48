"""The device `npu` on the stand-in for torch_npu: each graph mode gives the tokens of the eager engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from tiny import save_tiny
from npu_tokens import SIZES, check_equal, run

from piecework.engine.result import Result
from piecework.errors import ModelError
from piecework.weights.source import resolve


@dataclass(frozen=True)
class Mode:
    """How programs run on the NPU, and how many graphs that takes for L layers."""

    decode: str
    prefill: str
    compiler: str = "eager"

    def settings(self) -> dict[str, Any]:
        """Keyword arguments of LLM."""
        config: dict[str, Any] = {
            "compiler": self.compiler,
            "decode_graph": self.decode,
            "prefill_graph": self.prefill,
            "strict": False,
        }
        if self.decode != "eager":
            config["decode_capture_sizes"] = SIZES
        if self.prefill != "eager":
            config["prefill_capture_sizes"] = [4, 16, 48]
        return {"device": "npu", "page_size": 128, "compilation_config": config}

    def captures(self, layers: int) -> int:
        """Graphs of the body: sizes for a full decode, a graph per piece and size for pieces."""
        sizes = {*(SIZES if self.decode == "piecewise" else ()), *([4, 16, 48] if self.prefill != "eager" else ())}
        return len(sizes) * (layers + 1) + (len(SIZES) if self.decode == "full" else 0)


MODES = [
    Mode("full", "piecewise"),
    Mode("piecewise", "piecewise"),
    Mode("full", "eager"),
    Mode("eager", "eager"),
    Mode("full", "piecewise", "dynamo:eager"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        name: str(save_tiny(tmp_path_factory.mktemp(name), name, num_hidden_layers=2))
        for name in ("qwen3", "qwen3_moe")
    }


@pytest.fixture(scope="module")
def expected(models: dict[str, str]) -> dict[tuple[str, str], list[Result]]:
    made = {}
    for name, quantization in (("qwen3", "auto"), ("qwen3_moe", "auto"), ("qwen3", "w8a8-dynamic")):
        options = {"quantization": quantization}
        made[name, quantization], _, _ = run(models[name], {"device": "cpu"}, 320, 10, **options)
    return made


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(
    ("name", "quantization"), [("qwen3", "auto"), ("qwen3_moe", "auto"), ("qwen3", "w8a8-dynamic")]
)
def test_tokens_are_those_of_the_eager_engine(
    mode: Mode, name: str, quantization: str, models: Any, expected: Any, twin: Any, float32: None
) -> None:
    found, counters, layers = run(models[name], mode.settings(), 320, 10, quantization=quantization)
    check_equal(expected[name, quantization], found)
    assert counters.captures == mode.captures(layers)
    assert (counters.replays > 0) == (mode.captures(layers) > 0)
    assert (counters.pieces, counters.holes) == (layers + 1, layers)
    assert counters.recompiles == counters.compile_failures == 0
    assert "npu_fused_infer_attention_score" in twin.called
