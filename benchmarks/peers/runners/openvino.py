"""OpenVINO GenAI's engine with continuous batching."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from benchmarks.peers.protocol import Times, Tokens, serve


class OpenVino:
    """A folder with the model's IR, or a GGUF file. `hints` are properties of OpenVINO's CPU plugin."""

    def __init__(self, model: str, threads: int, **hints: Any) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 1  # GB
        scheduler.max_num_batched_tokens = 2048  # a whole prompt, or all of them, in one step
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": threads, **hints}
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        path = Path(model)
        weights = path if path.is_file() else path / "openvino_model.bin"
        self.facts = {
            "version": genai.__version__.split("-")[0],
            "weight_bytes": weights.stat().st_size,
            "openvino": openvino.__version__,
        }
        self._calls = 0

    def generate(self, prompts: Tokens, output_len: int) -> tuple[Tokens, Times]:
        """See `Engine`."""
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = output_len, True, False
        tokens: Tokens = [[] for _ in prompts]
        times: Times = [[] for _ in prompts]
        start = time.perf_counter()
        handles = []
        for ids in prompts:
            tensor = openvino.Tensor(np.array([ids], dtype=np.int64))
            handles.append(self._pipeline.add_request(self._calls, tensor, config))
            self._calls += 1
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            elapsed = time.perf_counter() - start
            for number, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        tokens[number] += output.generated_ids
                        times[number] += [elapsed] * len(output.generated_ids)
        return tokens, times


if __name__ == "__main__":
    serve(OpenVino)
