"""A program as one call and piece by piece, each over a KV cache of its own that sees the same batches."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from native_models import native_program
from torch import Tensor

from piecework.compile.chain import Chain
from piecework.devices import make_device
from piecework.graph.program import Program
from piecework.kvcache import AttentionMetadata, LayerShape, PagedKVCache, PagePool, pages_for
from piecework.models.decoder import CausalLM
from piecework.runner.attention import PagedAttention
from piecework.runner.batch import BatchInputs, BatchItem, Span, build_inputs
from piecework.runner.chained import ChainedStep

PAGE, PAGES = 4, 200


class ChainRig:
    """Sequences that grow by whatever a step gives them."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.program = native_program(model, "native")
        self.chain = Chain(self.program)
        self.caches = [make_cache(model), make_cache(model)]
        self.step = ChainedStep(self.chain, self.caches[0], debug=True)
        self._pool = PagePool(PAGES)
        self._held: dict[int, list[int]] = {}
        self._done: dict[int, int] = {}

    def batch(self, lengths: dict[int, int], seed: int = 0) -> BatchInputs:
        """Give each sequence so many random tokens more."""
        draw = random.Random(seed)
        items = []
        for sequence, length in lengths.items():
            span = Span(self._done.get(sequence, 0), length)
            held = self._held.setdefault(sequence, [])
            more = self._pool.allocate(pages_for(span.stop, PAGE) - len(held))
            assert more is not None
            held += more
            self._done[sequence] = span.stop
            tokens = [draw.randrange(self.model.config.vocab_size) for _ in range(length)]
            items.append(BatchItem(tokens, span, list(held)))
        return build_inputs(items, PAGE, self.program.device)

    def finish(self, sequence: int) -> None:
        self._pool.release(self._held.pop(sequence))
        del self._done[sequence]

    @torch.inference_mode()
    def both(self, inputs: Sequence[Tensor], metadata: AttentionMetadata) -> tuple[Tensor, Tensor]:
        """What the chain gives, and the pieces."""
        found = self.step(inputs, metadata)
        return found, run_pieces(self.model, self.program, self.caches[1], inputs, metadata)

    def check(self, lengths: dict[int, int], seed: int = 0) -> Tensor:
        """Run a batch both ways: the same bits, in the result and in both caches."""
        made = self.batch(lengths, seed)
        found, expected = self.both([made.input_ids, made.positions], made.metadata)
        assert torch.equal(found, expected), lengths
        assert torch.isfinite(expected).all() and expected.float().std() > 0.1
        for ours, theirs in zip(*(cache.tensors().values() for cache in self.caches), strict=True):
            assert torch.equal(ours, theirs)
        return found


def make_cache(model: CausalLM) -> PagedKVCache:
    layers = [LayerShape(spec.num_kv_heads, spec.head_dim) for spec in model.attention_specs]
    return PagedKVCache(layers, PAGES, PAGE, model.dtype, make_device("cpu"))


def run_pieces(
    model: CausalLM,
    program: Program,
    cache: PagedKVCache,
    inputs: Sequence[Tensor],
    metadata: AttentionMetadata,
) -> Tensor:
    """The program's pieces one by one, with attention over the cache."""
    attend = PagedAttention(model.attention_specs, cache, program.device.op_order)
    result: Tensor = program.run(inputs, lambda *args: attend(*args, metadata))
    return result
