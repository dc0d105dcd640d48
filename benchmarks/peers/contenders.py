"""Who runs in which precision, and what is timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.peers.protocol import Times


@dataclass(frozen=True)
class Case:
    """A shape of work: `rounds` times `batch` prompts of `input_len` tokens, `output_len` more for each.

    `measure` says what its speed counts: decode steps after the first token, prompt tokens until it, or
    all output tokens.
    """

    name: str
    measure: str
    batch: int
    input_len: int
    output_len: int
    rounds: int

    def speed(self, times: Times) -> float:
        """Tokens a second, from the arrival times of one run."""
        if self.measure == "decode":
            steps = [after - before for row in times for before, after in pairwise(row)]
            return self.batch / median(steps)
        if self.measure == "prefill":
            return self.batch * self.input_len / max(row[0] for row in times)
        return sum(map(len, times)) / max(row[-1] for row in times)


CASES = {
    case.name: case
    for case in (
        Case("decode", "decode", 1, 16, 64, 3),
        Case("prefill", "prefill", 1, 430, 1, 3),
        Case("batch 8", "output", 8, 16, 64, 3),
        Case("batch 32", "output", 32, 16, 64, 3),
    )
}


@dataclass(frozen=True)
class Contender:
    """An engine on one file of the model; `settings` go to its runner beside the path and the threads."""

    engine: str
    variant: str
    model: str
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What the table calls it."""
        return f"{_NAMES[self.engine]} {self.variant}"

    @property
    def ours(self) -> bool:
        """Whether it is Piecework."""
        return self.engine == "piecework"


_NAMES = {
    "piecework": "Piecework",
    "llama": "llama.cpp",
    "openvino": "OpenVINO",
    "transformers": "transformers",
}
# The environment that runs an engine; None is that of the benchmark.
ENVIRONMENT = {"piecework": None, "transformers": None, "llama": "llama", "openvino": "ov"}

# The keys of the files are those of models.py. Piecework's first is the one whose weights the floor reads.
PRECISIONS: dict[str, Sequence[Contender]] = {
    "float32": (
        Contender("piecework", "float32", "float", {"dtype": "float32"}),
        Contender("llama", "F32", "f32.gguf"),
        Contender("openvino", "fp32", "ir-fp32", {"INFERENCE_PRECISION_HINT": "f32"}),
        Contender("transformers", "float32", "float", {"dtype": "float32"}),
    ),
    "16-bit": (
        Contender("piecework", "bfloat16", "float", {"dtype": "bfloat16"}),
        Contender("llama", "BF16", "bf16.gguf"),
        Contender("llama", "F16", "f16.gguf"),
        Contender("openvino", "fp16", "ir-fp16"),
        Contender("transformers", "bfloat16", "float", {"dtype": "bfloat16"}),
    ),
    "int8": (
        Contender(
            "piecework", "w8a8-dynamic", "float", {"dtype": "bfloat16", "quantization": "w8a8-dynamic"}
        ),
        Contender(
            "piecework",
            "w8a8-dynamic, the head too",
            "float",
            {"dtype": "bfloat16", "quantization": "w8a8-dynamic", "lm_head": "w8a8-dynamic"},
        ),
        Contender(
            "piecework",
            "w8, the head too",
            "float",
            {"dtype": "bfloat16", "quantization": "w8", "lm_head": "w8"},
        ),
        Contender("piecework", "Q8_0", "q8_0.gguf", {"quantization": "gguf"}),
        Contender("llama", "Q8_0", "q8_0.gguf"),
        Contender("openvino", "int8", "ir-int8"),
    ),
    "4-bit": (
        Contender("piecework", "Q4_1", "q4_1.gguf", {"quantization": "gguf"}),
        Contender("llama", "Q4_1", "q4_1.gguf"),
        Contender("openvino", "Q4_1", "q4_1.gguf"),
    ),
}
