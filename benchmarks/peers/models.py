"""The model's files for every engine, all made of one GGUF file and kept in a folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.peers.install import python_of
from piecework.quantization.tokenizer_files import copy_beside
from piecework.weights.gguf.checkpoint import GgufCheckpoint
from piecework.weights.source import Source, resolve

# llama.cpp's numbers of file types (`enum llama_ftype` in llama.h).
_FILE_TYPES = {"f32.gguf": 0, "f16.gguf": 1, "q8_0.gguf": 7, "bf16.gguf": 32}

_QUANTIZE = """
import sys, llama_cpp as llama
source, target, kind = sys.argv[1:]
params = llama.llama_model_quantize_default_params()
params.ftype, params.allow_requantize = int(kind), True
sys.exit(llama.llama_model_quantize(source.encode(), target.encode(), params))
"""


def make(folder: Path, environments: Path, model: str, keys: Iterable[str]) -> dict[str, Path]:
    """Make those of the files `keys` that `folder` lacks, and return their paths.

    Args:
        folder: where they are kept, for this model only.
        environments: the folder of the peers' virtual environments.
        model: a GGUF file, or what stands for one.
    """
    source = resolve(model, progress=_tell)
    if source.kind != "gguf":
        raise SystemExit(f"model={model!r} is not a GGUF file, of which the peers' files are made")
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for key in keys:
        if key == "q4_1.gguf":
            paths[key] = source.path  # as it was published
        elif key == "float":
            paths[key] = _once(folder / key, partial(_write_float, source))
        elif key in _FILE_TYPES:
            python, kind = python_of(environments, "llama"), str(_FILE_TYPES[key])
            command = [str(python), "-c", _QUANTIZE, str(source.path)]
            paths[key] = _once(folder / key, partial(_run, command, [kind]))
        else:
            floats = _once(folder / "float", partial(_write_float, source))
            tool = python_of(environments, "ov").with_name("optimum-cli")
            command = [str(tool), "export", "openvino", "--model", str(floats)]
            command += ["--task", "text-generation-with-past", "--weight-format", key.removeprefix("ir-")]
            paths[key] = _once(folder / key, partial(_run, command, []))
    return paths


def _once(path: Path, write: Callable[[Path], None]) -> Path:
    """Let `write` make what is missing at `path`, whole or not at all."""
    if not path.exists():
        _tell(f"making {path.name}")
        scratch = path.with_name(f".{os.getpid()}-{path.name}")
        write(scratch)
        scratch.rename(path)
    return path


def _write_float(source: Source, folder: Path) -> None:
    """Write the dequantised weights in the layout of Hugging Face, float32, which holds them exactly."""
    folder.mkdir()
    checkpoint = GgufCheckpoint(source.path)
    weights = {}
    for name in checkpoint.names():
        weights[name] = torch.empty(checkpoint.shape(name))
        checkpoint.read(name, weights[name])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = {name: value for name, value in checkpoint.config.items() if value is not None}
    # Both forms: transformers 4 reads `rope_theta` and `torch_dtype`, 5 the others.
    config |= {"rope_theta": config["rope_parameters"]["rope_theta"]}
    config |= {"dtype": "float32", "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    copy_beside(source, checkpoint, folder)
    checkpoint.close()


def _run(before: list[str], after: list[str], target: Path) -> None:
    """Run a command whose arguments have the target's path between them."""
    command = [*before, str(target), *after]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(
            f"{command[0]} ended with exit code {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}"
        )


def _tell(text: str) -> None:
    print(text, file=sys.stderr)
