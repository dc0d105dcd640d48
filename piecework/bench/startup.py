"""`bench startup`: cold and warm starts in processes of their own, stage by stage.

A cold start has an empty cache of compiled pieces, a warm one that of the start before it. The model's
files are as warm as the machine has them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from piecework.bench.options import StartupOptions
from piecework.errors import ModelError
from piecework.profile import now

COLD, WARM = "cold", "warm"
TOTALS = ("total", "processor")
COMPILED = ("trace", "passes", "split", "compile")
TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
"""What `--layers` starts where no model is named."""


@dataclass(frozen=True)
class Model:
    """A model to start: what it is called in the report, and the settings that name it."""

    name: str
    settings: Mapping[str, Any]


def run_startup(
    settings: Mapping[str, Any], options: StartupOptions, on_done: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Start each model cold and warm, as often as asked; `settings` are the engine's that were given."""
    starts: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="piecework-startup-") as folder:
        for model in models(settings, options, Path(folder)):
            measured: dict[str, list[dict[str, Any]]] = {COLD: [], WARM: []}
            for _ in range(options.repeat):
                with empty_cache(model.settings, Path(folder)) as own:
                    for kind in (COLD, WARM):
                        measured[kind].append(start(own, options.prompt_len))
                        on_done()
            starts += [{"model": model.name, "start": kind, **middle(measured[kind])} for kind in measured]
    return {"starts": starts, **comparison(starts)}


def models(settings: Mapping[str, Any], options: StartupOptions, folder: Path) -> Iterator[Model]:
    """Yield the models to start; those of `--layers` are configurations in `folder`, with random weights."""
    counts = options.layer_counts()
    if not counts:
        yield Model(settings.get("model", "the default model"), settings)
        return
    name, shape = "tiny", dict(TINY)
    if "model" in settings:
        name, shape = settings["model"], _shape_of(settings)
    for layers in counts:
        place = folder / f"{layers}-layers"
        place.mkdir()
        (place / "config.json").write_text(json.dumps({**shape, "num_hidden_layers": layers}))
        yield Model(f"{name}, {layers} layers", {**settings, "model": str(place), "load_format": "dummy"})


def _shape_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    from piecework.weights.load import open_checkpoint
    from piecework.weights.source import resolve

    cache_dir = settings.get("cache_dir")
    source = resolve(settings["model"], revision=settings.get("revision"), cache_dir=cache_dir)
    shape = dict(open_checkpoint(source, "dummy", cache_dir=cache_dir).config)
    shape.pop("layer_types", None)  # a list of as many as there were layers
    return shape


@contextmanager
def empty_cache(settings: Mapping[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield settings by which compiled pieces are kept in an empty folder, for the time of the block."""
    from piecework.compilation import OTHER_NAMES, read_object

    stated = read_object(settings.get("compilation_config") or {})
    kept = {key: v for key, v in stated.items() if OTHER_NAMES.get(key, key) != "compile_cache_dir"}
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        yield {**settings, "compilation_config": {**kept, "compile_cache_dir": cache}}


def start(settings: Mapping[str, Any], prompt_len: int) -> dict[str, Any]:
    """Start the engine in another process and return what it measured; its messages go where ours do.

    Raises ModelError where it fails.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    job = {"spawned": now(), "settings": dict(settings), "prompt_len": prompt_len}
    done = subprocess.run(
        [sys.executable, "-m", "piecework.bench.startup_child"],
        input=json.dumps(job),
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise ModelError(f"the engine did not start (exit code {done.returncode}); it says why above")
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def middle(measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The medians of repeated starts; what is no time is that of the last."""
    stages = {name: median(m["stages"][name] for m in measured) for name in measured[-1]["stages"]}
    return {**measured[-1], "stages": stages, **{n: median(m[n] for m in measured) for n in TOTALS}}


def comparison(starts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Cold starts of the least and the most layers: compile time and whole start-up by ratio.

    `ms_per_layer` is trace and passes of the deeper model, over its layers.
    """
    cold = sorted((s for s in starts if s["start"] == COLD), key=lambda s: int(s["layers"]))
    deep = cold[-1]
    each = (deep["stages"]["trace"] + deep["stages"]["passes"]) / deep["layers"] * 1e3
    found: dict[str, Any] = {"ms_per_layer": each}
    if len(cold) > 1:
        shallow = cold[0]
        found["layers"] = [shallow["layers"], deep["layers"]]
        found["compile_ratio"] = deep["stages"]["compile"] / shallow["stages"]["compile"]
        found["pipeline_ratio"] = pipeline(deep) / pipeline(shallow)
    return found


def pipeline(measured: Mapping[str, Any]) -> float:
    """Seconds from trace to compile."""
    return float(sum(measured["stages"][stage] for stage in COMPILED))
