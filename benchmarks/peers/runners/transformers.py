"""transformers, eager: the reference of all tokens, and a peer."""

from __future__ import annotations

import time

import torch
import transformers
from transformers import AutoModelForCausalLM

from benchmarks.peers.protocol import Times, Tokens, serve


class Transformers:
    """A model in the Hugging Face layout; all prompts of a call have one length."""

    def __init__(self, model: str, threads: int, dtype: str) -> None:
        torch.set_num_threads(threads)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        self.facts = {
            "version": transformers.__version__,
            "weight_bytes": sum(p.nbytes for p in self._model.parameters()),
            "torch": torch.__version__,
        }

    @torch.inference_mode()
    def generate(self, prompts: Tokens, output_len: int) -> tuple[Tokens, Times]:
        """See `Engine`."""
        start = time.perf_counter()
        ids, cache, columns, times = torch.tensor(prompts), None, [], []
        for _ in range(output_len):
            out = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, ids = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
            columns.append(ids[:, 0].tolist())
            times.append(time.perf_counter() - start)
        return [list(row) for row in zip(*columns, strict=True)], [times] * len(prompts)


if __name__ == "__main__":
    serve(Transformers)
