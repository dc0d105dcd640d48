"""One start of the engine in a process of its own; `bench startup` runs it and reads its line of JSON.

Standard input has an object: `spawned`, the time at which the process was asked for on the clock of
piecework.profile (which all processes of a machine share), `settings` of the engine, and `prompt_len`.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from piecework.collector import imports_stay
from piecework.errors import PieceworkError
from piecework.profile import now, processor_time

BEGIN = now()

# What the profile of a start has, and the stage that it belongs to, in order.
STAGES = {
    "load.source": "config",
    "load.config": "config",
    "load.tokenizer": "tokenizer",
    "load.weights": "weights",
    "trace": "trace",
    "passes": "passes",
    "split": "split",
    "compile": "compile",
    "capture.plan": "capture",
    "load.cache": "cache",
    "capture": "capture",
}


def main() -> int:
    """Start, generate one token, write what was measured; returns the exit code."""
    job = json.load(sys.stdin)
    try:
        measured = start(job["settings"], job["prompt_len"], job["spawned"])
    except PieceworkError as error:
        sys.stderr.write(f"piecework: error: {error}\n")
        return 2
    sys.stdout.write(json.dumps(measured) + "\n")
    return 0


def start(settings: dict[str, Any], prompt_len: int, spawned: float) -> dict[str, Any]:
    """Return seconds by stage, in order, and of the processor in all; the counters; memory in bytes."""
    before_imports = now()
    with imports_stay():
        from piecework.config import EngineConfig
        from piecework.engine.offline import run_requests
        from piecework.engine.service import Service
        from piecework.sampling import SamplingParams

    imported = now()
    resident = _memory("VmRSS")
    with closing(Service(EngineConfig.from_flat({**settings, "profile": True}))) as service:
        loaded = now()
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        prompt = [number % service.model_config.vocab_size for number in range(1, prompt_len + 1)]
        with closing(run_requests(service, [prompt], [params])) as deltas:
            next(deltas)
        finished, processor = now(), processor_time()
        stages = {"interpreter": BEGIN - spawned, "import": imported - before_imports}
        for name, stage in STAGES.items():
            timer = service.profile.snapshot()["timers"].get(name)
            stages[stage] = stages.get(stage, 0.0) + (timer["total_ms"] / 1e3 if timer else 0.0)
        stages["rest"] = loaded - spawned - sum(stages.values())
        stages["first token"] = finished - loaded
        cache = service.runner.cache
        return {
            "stages": stages,
            "total": finished - spawned,
            "processor": processor,
            "counters": service.graph_counters(),
            "layers": service.model_config.num_layers,
            "device": service.device_name,
            "dtype": service.dtype,
            "compiler": ", ".join(service.runner.compilers),
            "memory": memory(
                resident,
                _memory("VmHWM"),
                weights=service.weight_bytes,
                kv_cache=service.kv_bytes,
                kv_written=service.kv_bytes * -(-prompt_len // cache.page_size) // cache.num_pages,
            ),
        }


def memory(
    after_import: int | None, peak: int | None, *, weights: int, kv_cache: int, kv_written: int
) -> dict[str, Any]:
    """Return the sizes in bytes and two ratios, None where memory can't be read.

    Both are the peak beyond what imports took: `ratio` over weights and the pages of the cache that the
    prompt filled, `ratio_reserved` over weights and the whole cache, which takes memory only where written.
    """
    sizes = {
        "after_import": after_import,
        "peak": peak,
        "weights": weights,
        "kv_cache": kv_cache,
        "kv_written": kv_written,
    }
    if peak is None or after_import is None:
        return {**sizes, "ratio": None, "ratio_reserved": None}
    used = peak - after_import
    ratios = {"ratio": used / (weights + kv_written), "ratio_reserved": used / (weights + kv_cache)}
    return {**sizes, **ratios}


def _memory(name: str) -> int | None:
    """Bytes of this process as Linux counts them: VmRSS now, VmHWM at most; None elsewhere.

    Not getrusage's peak, which may be that of the parent process.
    """
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


if __name__ == "__main__":
    sys.exit(main())
