"""What to capture, from the configuration and what the device has."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from piecework.capture.plan import Wish
from piecework.capture.sizes import DECODE_SIZES, PREFILL_SIZES, check_sizes, default_sizes
from piecework.compilation import CompilationConfig
from piecework.devices import Device
from piecework.devices.base import GraphMode, Phase
from piecework.errors import ConfigError

log = logging.getLogger("piecework.capture")


@dataclass(frozen=True)
class CaptureOptions:
    """Graph modes of both phases, and the sizes to capture where a mode captures.

    `whole_sizes` are the batch sizes of decode that a compiler gets as whole programs; nothing is captured.
    Without `decode_padding`, a decode batch runs as a graph only if its own size was captured.
    """

    decode: GraphMode
    prefill: GraphMode
    decode_sizes: tuple[int, ...] = ()
    prefill_sizes: tuple[int, ...] = ()
    whole_sizes: tuple[int, ...] = ()
    decode_padding: bool = True

    @property
    def full_sizes(self) -> tuple[int, ...]:
        """Batch sizes for full graphs."""
        return self.decode_sizes if self.decode == "full" else ()

    @property
    def piecewise_sizes(self) -> tuple[int, ...]:
        """Row counts for piecewise graphs, which are the same for both phases."""
        sizes = self.decode_sizes if self.decode == "piecewise" else ()
        return tuple(sorted({*sizes, *(self.prefill_sizes if self.prefill == "piecewise" else ())}))

    @property
    def head_sizes(self) -> tuple[int, ...]:
        """Row counts for the head as its own graph, which a full graph doesn't need."""
        return self.decode_sizes if self.decode == "piecewise" else ()

    def wishes(self, num_pieces: int) -> list[Wish]:
        """Return what the plan has to find room for, given the number of pieces of the program."""
        every = [
            Wish("full", self.full_sizes, 1),
            Wish("piecewise", self.piecewise_sizes, num_pieces),
            Wish("head", self.head_sizes, 1),
        ]
        return [wish for wish in every if wish.sizes]


def choose_options(
    config: CompilationConfig, device: Device, *, max_num_seqs: int, max_tokens: int, max_model_len: int
) -> CaptureOptions:
    """Settle modes and sizes.

    Raises:
        ConfigError: a mode that the user asked for and the device lacks, or a size above what a step can
            have: `max_num_seqs` sequences, `max_tokens` tokens, or the context length; in strict mode,
            sizes for a phase that captures nothing.
    """
    if config.whole_program:
        if config.decode_graph == "eager":
            raise ConfigError("decode_graph", "eager", "full or auto, where splitting_ops is empty")
        sizes = _sizes("decode", "full", config, max_num_seqs, "max_num_seqs")
        return CaptureOptions("eager", "eager", whole_sizes=sizes)
    decode = _mode("decode_graph", config.decode_graph, device, "decode")
    prefill = _mode("prefill_graph", config.prefill_graph, device, "prefill")
    if not config.splitting_ops:  # nothing to cut at: only whole graphs
        decode = "eager" if decode == "piecewise" else decode
        prefill = "eager"
    tokens = min(max_tokens, max_model_len)
    tokens_name = "max_num_batched_tokens" if max_tokens <= max_model_len else "max_model_len"
    return CaptureOptions(
        decode,
        prefill,
        _sizes("decode", decode, config, max_num_seqs, "max_num_seqs"),
        _sizes("prefill", prefill, config, tokens, tokens_name),
        decode_padding=config.decode_padding,
    )


def _mode(field: str, asked: str, device: Device, phase: Phase) -> GraphMode:
    has = device.graph_modes(phase)
    if asked == "auto":
        best: GraphMode = "full" if phase == "decode" else "piecewise"
        if has[0] != best:
            log.info("%s=%s: the device %s has no %s graphs", field, has[0], device.name, best)
        return has[0]
    for mode in has:
        if mode == asked:
            return mode
    nothing = "" if device.captures else "; it captures nothing"
    allowed = f"one of {', '.join(has)}, which the device {device.name} has, or auto{nothing}"
    raise ConfigError(field, asked, allowed)


def _sizes(
    phase: Phase, mode: GraphMode, config: CompilationConfig, limit: int, limit_name: str
) -> tuple[int, ...]:
    """Return the sizes that were given for a phase, or the default ones up to `limit`.

    A largest size that was given for this phase may not lie above it; one for both phases may.
    """
    field, top_field = f"{phase}_capture_sizes", f"max_{phase}_capture_size"
    given: Sequence[int] | None = getattr(config, field)
    top: int | None = getattr(config, top_field)
    if top is not None and top > limit:
        raise ConfigError(top_field, top, f"at most {limit_name}={limit}")
    sizes = () if given is None else check_sizes(field, given, limit, limit_name)
    if mode == "eager" and given is not None:
        _captures_nothing(field, list(given), phase, config.strict)
    if mode == "eager" and top is not None:
        _captures_nothing(top_field, top, phase, config.strict)
    if given is not None or mode == "eager":
        return sizes
    largest = top or config.max_capture_size or (DECODE_SIZES if phase == "decode" else PREFILL_SIZES)[-1]
    if largest > limit:
        log.info("%s is captured up to %s=%d, not up to %d", phase, limit_name, limit, largest)
    largest = min(largest, limit)
    if phase == "decode" and not config.decode_padding:
        return tuple(range(1, largest + 1))
    return default_sizes(phase, largest)


def _captures_nothing(field: str, value: int | list[int], phase: Phase, strict: bool) -> None:
    if strict:
        raise ConfigError(field, value, f"no sizes where {phase} runs eagerly")
    log.warning("%s=%s captures nothing: %s runs eagerly", field, value, phase)
