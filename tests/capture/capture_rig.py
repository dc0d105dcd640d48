"""Tiny models as captured programs over a real KV cache, and what the eager model says to the same batch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from piecework.capture.buffers import StaticBuffers
from piecework.capture.options import CaptureOptions
from piecework.capture.runner import GraphRunner
from piecework.compilation import CompilationConfig
from piecework.compile.base import CompileContext, FunctionPiece
from piecework.compile.eager import EagerCompiler
from piecework.devices import make_device
from piecework.devices.base import Device
from piecework.devices.sim import SimDevice
from piecework.graph.build import Options, build_head_program, build_program
from piecework.graph.counters import Counters
from piecework.kvcache import LayerShape, PagedKVCache, PagePool, pages_for
from piecework.models.build import build_model
from piecework.models.config import ModelConfig
from piecework.models.decoder import CausalLM
from piecework.runner.attention import PagedAttention
from piecework.runner.batch import BatchInputs, BatchItem, Span, build_inputs

PAGE = 4
VOCAB = 96
_CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
FULL = CaptureOptions("full", "piecewise", (1, 2, 4), (4, 8))
PIECEWISE = CaptureOptions("piecewise", "piecewise", (1, 2, 4), (4, 8))
EAGER = CaptureOptions("eager", "eager")
_KINDS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
}


def tiny(kind: str, device: Device, **overrides: Any) -> CausalLM:
    """A model with random weights; the same ones for the same arguments."""
    config = ModelConfig.from_dict({**_CONFIG, **_KINDS[kind], **overrides})
    model = build_model(config, dtype=torch.float32, device=device.torch_device, max_positions=64)
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


class OpaqueCompiler(EagerCompiler):
    """Pieces whose inside no recorder looks into, as generated code's is."""

    name = "opaque"

    def compile(self, piece: fx.GraphModule, context: CompileContext) -> FunctionPiece:
        return FunctionPiece(super().compile(piece, context).function, self.name, opaque=True)


@dataclass
class Rig:
    """A model on a device in some graph mode, sequences that run on it, and the eager model beside it."""

    kind: str = "llama"
    device: Device = field(default_factory=lambda: SimDevice(capacity=1 << 26))
    options: CaptureOptions = FULL
    compiler: str = "eager"
    opaque: bool = False
    pages: int = 64
    debug: bool = False
    strict: bool = False
    overrides: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = tiny(self.kind, self.device, **self.overrides)
        self.device.prepare_weights(self.model)
        shapes = [LayerShape(s.num_kv_heads, s.head_dim) for s in self.model.attention_specs]
        self.cache = PagedKVCache(shapes, self.pages, PAGE, torch.float32, self.device)
        self.pool = PagePool(self.pages)
        self.counters, self.head_counters = Counters(), Counters()
        self.build()
        self.eager = Eager(self.kind, self.pages, self.overrides)
        self.pages_of: dict[int, list[int]] = {}
        self.tokens_of: dict[int, list[int]] = {}

    def build(self) -> Rig:
        """Make programs, buffers and the runner."""
        config = CompilationConfig(compiler=self.compiler)
        compiler = OpaqueCompiler() if self.opaque else None
        settings = Options(self.device, config, compiler=compiler, counters=self.counters, max_tokens=64)
        self.program = build_program(self.model, settings)
        self.head = build_head_program(self.model, replace(settings, counters=self.head_counters))
        every = (*self.options.decode_sizes, *self.options.prefill_sizes, 1)
        sequences = max((*self.options.decode_sizes, 1))
        self.buffers = StaticBuffers(self.device, tokens=max(every), sequences=sequences, table_width=16)
        self.runner = self.make_runner()
        return self

    def make_runner(self, **changes: Any) -> GraphRunner:
        attend = changes.pop("attend", None)
        attend = attend or PagedAttention(self.model.attention_specs, self.cache, self.device.op_order)
        return GraphRunner(
            self.program,
            self.head,
            self.device,
            self.options,
            self.buffers,
            attend,
            counters=self.counters,
            head_counters=self.head_counters,
            watched=self.cache.tensors,
            debug=self.debug,
            strict=self.strict,
            **changes,
        )

    def capture(self) -> Rig:
        self.runner.capture(self.runner.plan())
        return self

    def item(self, sequence: int, tokens: Sequence[int]) -> BatchItem:
        """Append `tokens` to a sequence, with pages for them."""
        held = self.pages_of.setdefault(sequence, [])
        done = self.tokens_of.setdefault(sequence, [])
        span = Span(len(done), len(tokens))
        more = self.pool.allocate(pages_for(span.stop, PAGE) - len(held))
        assert more is not None
        held += more
        done += tokens
        return BatchItem(list(tokens), span, list(held))

    def finish(self, sequence: int) -> None:
        self.pool.release(self.pages_of.pop(sequence))
        del self.tokens_of[sequence]

    def run(self, *items: BatchItem, phase: str | None = None) -> tuple[Tensor, Tensor]:
        """Run a step; returns hidden states and logits of every item's last row, as they are now."""
        inputs = build_inputs(items, PAGE, self.device)
        phase = phase or ("decode" if all(item.span.length == 1 for item in items) else "prefill")
        rows = [start - 1 for start in inputs.starts[1:]]
        hidden, logits = self.runner.run(phase, inputs.input_ids, inputs.positions, inputs.metadata, rows)
        assert logits is not None
        return hidden.cpu().clone(), logits.cpu().clone()

    def check(self, *items: BatchItem, phase: str | None = None) -> Tensor:
        """Run a step here and on the eager model; the numbers must agree. Returns the logits."""
        expected_hidden, expected = self.eager.run(items)
        hidden, logits = self.run(*items, phase=phase)
        torch.testing.assert_close(hidden, expected_hidden, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        return logits


class Eager:
    """The plain model on the CPU device with a cache of its own, which sees the same batches."""

    def __init__(self, kind: str, pages: int, overrides: dict[str, Any]) -> None:
        self.device = cpu = make_device("cpu")
        self.model = tiny(kind, cpu, **overrides)
        shapes = [LayerShape(s.num_kv_heads, s.head_dim) for s in self.model.attention_specs]
        self.cache = PagedKVCache(shapes, pages, PAGE, torch.float32, cpu)
        self.attend = PagedAttention(self.model.attention_specs, self.cache, cpu.op_order)

    @torch.inference_mode()
    def run(self, items: Sequence[BatchItem]) -> tuple[Tensor, Tensor]:
        inputs: BatchInputs = build_inputs(items, PAGE, self.device)
        self.model.bind_attention(lambda *args: self.attend(*args, inputs.metadata))
        hidden = self.model(inputs.input_ids, inputs.positions)
        last = [start - 1 for start in inputs.starts[1:]]
        return hidden, self.model.head(hidden[last])


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return [random.Random(seed * 1000 + i).randrange(VOCAB) for i in range(length)]
