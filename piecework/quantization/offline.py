"""`piecework quantize` as a function: from a float model to a folder with an int8 checkpoint."""

from __future__ import annotations

import fnmatch
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from piecework.errors import ConfigError
from piecework.layers.int8 import StaticInput
from piecework.layers.parameter import deferred_parameters
from piecework.models.build import build_model
from piecework.models.config import ModelConfig
from piecework.quantization.calibrate import Calibration, calibrate, cut_samples
from piecework.quantization.choose import stated_reader
from piecework.quantization.files import whole_folder
from piecework.quantization.load import load_model
from piecework.quantization.on_load import FloatReader
from piecework.quantization.options import Options
from piecework.quantization.reader import Scheme
from piecework.quantization.smooth import channel_shares, norm_before, smooth
from piecework.quantization.targets import Target, find_targets, kept_float
from piecework.quantization.texts import read_texts
from piecework.quantization.tokenizer_files import copy_beside
from piecework.quantization.write import write_checkpoint
from piecework.tokenizer.load import load_tokenizer
from piecework.weights.checkpoint import Checkpoint
from piecework.weights.load import load_weights, open_checkpoint
from piecework.weights.source import Source

log = logging.getLogger("piecework.load")


@dataclass(frozen=True)
class Outcome:
    """What was written: linears by scheme, and the static ones' mean relative errors of a token."""

    linears: Mapping[Scheme, Sequence[str]]
    errors: Mapping[str, float]
    dynamic: Mapping[str, str]
    """The linears that stay dynamic in a static checkpoint, each with its reason."""
    tokens: int
    smoothed: int
    """Of how many linears the inputs were smoothed."""


def quantise(
    source: Source,
    out: Path,
    options: Options,
    *,
    cache_dir: str | None = None,
    say: Callable[[str], None] = log.info,
    step: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Quantise the model of `source` and write it to the folder `out`, which is whole or not there.

    Raises:
        ConfigError: an option doesn't fit, `out` exists, or the calibration file can't be used.
        ModelError: the model can't be read or is quantised already.
    """
    checkpoint = open_checkpoint(source, cache_dir=cache_dir)
    try:
        stated = stated_reader(checkpoint)
        if stated is not None:
            raise ConfigError("model", checkpoint.where, f"a float model; it is {stated.description}")
        config = ModelConfig.from_dict(checkpoint.config)
        with whole_folder(out) as folder:
            weights, inputs, outcome = _calibrated(source, checkpoint, config, options, cache_dir, say, step)
            say("quantising")
            reader = FloatReader(weights, options.scheme, inputs=inputs)
            with deferred_parameters():
                model = build_model(config, dtype=torch.float32, device="cpu", max_positions=1)
            reader.exclude(kept_float(model))
            targets = _targets(model, reader, checkpoint)
            dtype = options.dtype or (torch.bfloat16 if source.kind == "gguf" else None)
            write_checkpoint(
                folder, model, checkpoint, reader, targets, symmetric=not options.asymmetric, dtype=dtype
            )
            copy_beside(source, checkpoint, folder, cache_dir)
    finally:
        checkpoint.close()
    schemes: dict[Scheme, list[str]] = {}
    for target in targets:
        schemes.setdefault(target.scheme, []).append(target.name)
    return replace(outcome, linears=schemes)


def _targets(model: torch.nn.Module, reader: FloatReader, checkpoint: Checkpoint) -> list[Target]:
    offered = set(checkpoint.names())
    return find_targets(model, reader, offered.__contains__, checkpoint.where)


def _calibrated(
    source: Source,
    checkpoint: Checkpoint,
    config: ModelConfig,
    options: Options,
    cache_dir: str | None,
    say: Callable[[str], None],
    step: Callable[[int, int], None],
) -> tuple[Checkpoint, dict[str, StaticInput], Outcome]:
    """Return the weights to quantise, the inputs by the checkpoint's linears, and what is to tell of them."""
    if options.calibration is None:
        return checkpoint, {}, Outcome({}, {}, {}, 0, 0)
    texts = read_texts(options.calibration)
    tokenizer = load_tokenizer(source, cache_dir)
    if tokenizer is None:
        raise ConfigError("calibration", options.calibration, "a model with a tokenizer, to read texts with")
    samples = cut_samples(
        [tokenizer.encode(text) for text in texts[: options.samples]],
        count=options.samples,
        max_tokens=min(options.max_tokens, config.max_position),
        vocab_size=config.vocab_size,
    )
    say(f"calibrating on {len(samples)} texts, {sum(map(len, samples))} tokens")
    positions = max(map(len, samples))
    cpu = torch.device("cpu")
    model = load_model(config, checkpoint, None, dtype=torch.float32, device=cpu, max_positions=positions)
    reader = FloatReader(checkpoint, "w8a8-dynamic")
    reader.exclude(kept_float(model))
    targets = {target.name: target for target in _targets(model, reader, checkpoint)}
    static = options.scheme == "w8a8-static"
    done, total = 0, len(samples) * (bool(options.smooth) + 2 * static)

    def sample_done() -> None:
        nonlocal done
        done += 1
        step(done, total)

    weights, smoothed = checkpoint, 0
    if options.smooth:
        shares = channel_shares(model, samples, [n for n in targets if norm_before(n)], sample_done)
        weights = made = smooth(checkpoint, list(targets.values()), shares, options.smooth)
        smoothed = len(made.moved)
    if not static:
        return weights, {}, Outcome({}, {}, {}, sum(map(len, samples)), smoothed)
    load_weights(model, weights)
    found = calibrate(
        model,
        samples,
        targets,
        percentile=options.percentile,
        symmetric=not options.asymmetric,
        step=sample_done,
    )
    dynamic = _dynamic(found, targets, options)
    inputs = {
        part.linear: found.inputs[name]
        for name, target in targets.items()
        if name not in dynamic
        for part in target.parts
    }
    return weights, inputs, Outcome({}, found.errors, dynamic, found.tokens, smoothed)


def _dynamic(found: Calibration, targets: Mapping[str, Target], options: Options) -> dict[str, str]:
    """Which linears stay dynamic, and why; a pattern that names none is a mistake."""
    dynamic: dict[str, str] = {}
    for pattern in options.keep_dynamic:
        matches = [n for n, target in targets.items() if any(_fits(pattern, one) for one in _names(target))]
        if not matches:
            raise ConfigError("keep_dynamic", pattern, "a pattern that fits a linear, such as *.down_proj")
        dynamic.update(dict.fromkeys(matches, f"asked for by {pattern}"))
    if options.max_error is not None:
        for name, error in found.errors.items():
            if error > options.max_error and name not in dynamic:
                dynamic[name] = f"a static scale would lose {error:.0%} of a token"
    return dynamic


def _names(target: Target) -> list[str]:
    return [target.name, *(part.linear for part in target.parts)]


def _fits(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.search(pattern.removeprefix("re:"), name) is not None
        except re.error as error:
            raise ConfigError("keep_dynamic", pattern, f"a pattern that compiles ({error})") from error
    return fnmatch.fnmatchcase(name, pattern)
