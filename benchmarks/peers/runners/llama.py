"""llama.cpp by the low-level calls of llama-cpp-python, so that several sequences share a batch."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import llama_cpp as llama
import numpy as np

from benchmarks.peers.protocol import Times, Tokens, serve

_BATCH = 1024  # tokens in one call


class Llama:
    """A GGUF file. There is a context for each number of sequences, made at its first use."""

    def __init__(self, model: str, threads: int) -> None:
        llama.llama_backend_init()
        self._threads = threads
        self._model = llama.llama_model_load_from_file(model.encode(), llama.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"{model} cannot be loaded")
        self._vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._contexts: dict[int, Any] = {}
        self.facts = {
            "version": llama.__version__,
            "weight_bytes": llama.llama_model_size(self._model),
            "system": llama.llama_print_system_info().decode().strip(),
        }

    def _context(self, sequences: int) -> Any:
        if sequences not in self._contexts:
            params = llama.llama_context_default_params()
            params.n_ctx = 1024 if sequences == 1 else 256 * sequences
            params.n_batch = params.n_ubatch = min(_BATCH, params.n_ctx)
            params.n_seq_max = sequences
            params.n_threads = params.n_threads_batch = self._threads
            self._contexts[sequences] = llama.llama_init_from_model(self._model, params)
            if not self._contexts[sequences]:
                raise RuntimeError(f"no context for {sequences} sequences")
        return self._contexts[sequences]

    def _decode(self, context: Any, rows: Tokens, position: int) -> list[int]:
        """Run one batch, a row of token ids for each sequence from `position` on; return the next tokens."""
        count = sum(map(len, rows))
        if count > _BATCH:
            raise ValueError(f"{count} tokens in one batch, at most {_BATCH}")
        batch = llama.llama_batch_init(count, 0, 1)
        try:
            at = 0
            for sequence, ids in enumerate(rows):
                for offset, token in enumerate(ids):
                    batch.token[at], batch.pos[at] = token, position + offset
                    batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
                    batch.logits[at] = offset == len(ids) - 1
                    at += 1
            batch.n_tokens = count
            code = llama.llama_decode(context, batch)
            if code:
                raise RuntimeError(f"llama_decode returned {code}")
        finally:
            llama.llama_batch_free(batch)
        # The rows that asked for logits lie one after the other.
        pointer = ctypes.cast(llama.llama_get_logits(context), ctypes.POINTER(ctypes.c_float))
        logits = np.ctypeslib.as_array(pointer, (len(rows), self._vocab))
        return [int(token) for token in logits.argmax(1)]

    def generate(self, prompts: Tokens, output_len: int) -> tuple[Tokens, Times]:
        """See `Engine`. All prompts of a call have one length."""
        context = self._context(len(prompts))
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        start = time.perf_counter()
        columns, times = [], []
        rows, position = prompts, 0
        for _ in range(output_len):
            columns.append(self._decode(context, rows, position))
            times.append(time.perf_counter() - start)
            position += len(rows[0])
            rows = [[token] for token in columns[-1]]
        return [list(row) for row in zip(*columns, strict=True)], [times] * len(prompts)


if __name__ == "__main__":
    serve(Llama)
