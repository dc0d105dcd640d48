"""What `check-env MODEL` says about a model: one sentence for each thing that decides whether it fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from piecework.cli.environment import Finding
from piecework.config import EngineConfig
from piecework.units import format_size

if TYPE_CHECKING:
    from piecework.engine.fit import Choice, Fit


def check_model(config: EngineConfig) -> tuple[Fit, list[Finding]]:
    """Return what the model takes, and the sentences. Raises ModelError and ConfigError as `fit` does."""
    from piecework.engine.fit import fit

    found = fit(config)
    return found, list(sentences(found))


def sentences(fit: Fit) -> Iterator[Finding]:
    """Yield what the model is, its weights, its cache, and whether it fits; a misfit is a problem."""
    text = f"{fit.model} is a {fit.architecture} of {fit.num_layers} layers: {fit.path}."
    yield Finding("model", "ok", text)
    asked, free = fit.asked, format_size(fit.free_bytes)
    text = f"Its weights take {_weights(asked)} in {_name(asked)}"
    if fit.others:
        text += "; " + ", ".join(f"{_weights(c)} in {_name(c)}" for c in fit.others)
    if any(c.most_bytes > c.weight_bytes for c in (asked, *fit.others)):
        text += "; the most is without 12 bits, in which only some matrices may be"
    yield Finding("weights", "ok", f"{text}.")
    text = f"The KV cache takes {format_size(asked.page_bytes / fit.page_size)} a token; "
    text += f"in the {free} that are free on {fit.device}, {asked.tokens:,} tokens fit beside the weights"
    yield Finding("kv_cache", "ok", f"{text} (the longest context is {fit.max_context:,}).")
    if fit.fits:
        text = f"It fits: the KV cache will hold {fit.cache_tokens:,} tokens of all requests."
        yield Finding("fit", "ok", text)
    else:
        yield Finding("fit", "problem", f"It does not fit: {_reason(fit)}. {_remedy(fit)}")


def _weights(choice: Choice) -> str:
    least, most = format_size(choice.weight_bytes), format_size(choice.most_bytes)
    return least if least == most else f"{least} to {most}"


def _name(choice: Choice) -> str:
    if choice.quantization in ("auto", "none"):
        return choice.dtype
    return f"{choice.quantization} beside {choice.dtype}"


def _reason(fit: Fit) -> str:
    if fit.reason is not None:
        return fit.reason
    weights, free = format_size(fit.asked.weight_bytes), format_size(fit.free_bytes)
    return f"its weights take {weights}, and {free} are free"


def _remedy(fit: Fit) -> str:
    """Name what would fit in place of what was asked for."""
    if fit.asked.tokens >= fit.wanted:
        return "With more for the KV cache, or its size left to the engine, it would."
    would = [_flags(choice) for choice in fit.others if choice.tokens >= fit.wanted]
    if fit.asked.tokens > 0:
        would.append(f"--max-model-len {fit.asked.tokens}")
    if would:
        return f"What would fit: {', or '.join(would)}."
    least = min((fit.asked, *fit.others), key=lambda choice: choice.weight_bytes)
    return f"Nothing would: the least is {format_size(least.weight_bytes)} of weights in {_name(least)}."


def _flags(choice: Choice) -> str:
    flags = f"--dtype {choice.dtype}"
    return flags if choice.quantization == "auto" else f"{flags} --quantization {choice.quantization}"
