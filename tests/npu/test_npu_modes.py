"""The device `npu` on the stand-in for torch_npu: each graph mode gives the tokens of the eager engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from npu_tokens import DEFAULT_VOCABULARY, VOCABULARY, check_equal, run
from shrinking_batches import CAPTURED, PREFILLS
from tiny import save_tiny

from piecework import LLM
from piecework.devices.sim.memory import SimMemory


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
        }
        if self.decode != "eager":
            config["decode_capture_sizes"] = CAPTURED
        if self.prefill != "eager":
            config["prefill_capture_sizes"] = PREFILLS
        return {"device": "npu", "page_size": 128, "compilation_config": config}

    def captures(self, layers: int) -> int:
        """Graphs of the body: sizes for a full decode, a graph per piece and size for pieces."""
        sizes = {
            *(CAPTURED if self.decode == "piecewise" else ()),
            *(PREFILLS if self.prefill != "eager" else ()),
        }
        return len(sizes) * (layers + 1) + (len(CAPTURED) if self.decode == "full" else 0)


MODES = [
    Mode("full", "piecewise"),
    Mode("piecewise", "piecewise"),
    Mode("full", "eager"),
    Mode("eager", "eager"),
    Mode("full", "piecewise", "dynamo:eager"),
]


SLOW = pytest.mark.slow
CASES = [
    pytest.param(
        mode,
        kind,
        quantization,
        marks=[] if (kind, quantization, mode) == ("qwen3", "auto", MODES[0]) else SLOW,
    )
    for kind, quantization in (("qwen3", "auto"), ("qwen3_moe", "auto"), ("qwen3", "w8a8-dynamic"))
    for mode in MODES
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("mode", "kind", "quantization"), CASES, ids=str)
def test_tokens_are_those_of_the_eager_engine(
    mode: Mode, kind: str, quantization: str, tiny_path: Any, expected: Any, twin: Any, float32: None
) -> None:
    wanted = expected(kind, quantization)
    found, counters, layers = run(
        tiny_path(kind), {**mode.settings(), "quantization": quantization}, VOCABULARY
    )
    check_equal(wanted, found)
    assert counters.captures == mode.captures(layers)
    assert (counters.replays > 0) == (mode.captures(layers) > 0)
    assert (counters.pieces, counters.holes) == (layers + 1, layers)
    assert counters.recompiles == counters.compile_failures == 0
    # CPU tensors take the CPU's key in what torch.compile made; on an NPU they take its own.
    called = CALLED[kind, quantization] if mode.compiler == "eager" else set()
    assert {"npu_fused_infer_attention_score", *called} <= twin.called


CALLED = {
    ("qwen3", "auto"): {"npu_add_rms_norm", "npu_rotary_mul", "npu_swiglu"},
    ("qwen3_moe", "auto"): {"npu_add_rms_norm", "npu_grouped_matmul"},
    ("qwen3", "w8a8-dynamic"): {"npu_quant_matmul", "npu_add_rms_norm_dynamic_quant"},
}
"""What of the library each model must have run."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", MODES[:2], ids=str)
def test_the_default_model(mode: Mode, default_expected: Any, twin: Any, float32: None) -> None:
    twin.memory = SimMemory(3 << 29)
    found, counters, layers = run("smollm2-135m", mode.settings(), DEFAULT_VOCABULARY, 32)
    check_equal(default_expected, found)
    assert counters.captures == mode.captures(layers) and counters.replays > 0


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("layers", "budget", "rows"),
    [
        pytest.param(30, 1800, 8, marks=pytest.mark.slow),
        pytest.param(64, 400, 8, marks=pytest.mark.slow),
        pytest.param(64, 1800, 64, marks=pytest.mark.soak),
    ],
)
def test_deep_models_stay_within_the_budget(
    layers: int,
    budget: int,
    rows: int,
    tmp_path: Any,
    twin: Any,
    float32: None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Default sizes of a model with so many layers: of 64, not all fit.

    What the plan is for an NPU's own budget is in test_npu_device.py; so many captures take minutes here.
    """
    monkeypatch.setattr("piecework.devices.npu.GRAPH_BUDGET", budget)
    monkeypatch.setattr("piecework.devices.npu.NpuDevice.graph_budget", budget)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "max_position_embeddings": 512}
    model = str(save_tiny(tmp_path, "qwen3", num_hidden_layers=layers, **sizes))
    config = {"compiler": "eager", "decode_graph": "piecewise"}
    with LLM(
        model,
        device="npu",
        workers="inline",
        dtype="float32",
        page_size=128,
        max_num_seqs=rows,
        max_num_batched_tokens=8 * rows,
        max_model_len=512,
        kv_cache_memory=2**26,
        compilation_config=config,
    ) as llm:
        programs = llm.service.runner.programs
        assert programs.plan is not None
        assert twin.graphs == programs.plan.graphs <= budget
        assert bool(programs.plan.dropped) == (layers == 64)
    assert (f"room for {budget} graphs" in caplog.text) == (layers == 64)
