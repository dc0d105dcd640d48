"""Settles where int8 weights come from: the checkpoint's own format, or quantisation as it is read."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import cast

from piecework.errors import ConfigError, ModelError
from piecework.quantization.compressed_tensors import CompressedTensorsReader
from piecework.quantization.modelslim import ModelSlimReader, description_of
from piecework.quantization.on_load import FloatReader
from piecework.quantization.reader import Reader, Scheme
from piecework.weights.checkpoint import Checkpoint
from piecework.weights.dummy import DummyCheckpoint
from piecework.weights.gguf.checkpoint import GgufCheckpoint
from piecework.weights.safetensors import SafetensorsCheckpoint
from piecework.weights.sharded import whole_of

log = logging.getLogger("piecework.load")

METHODS = {"compressed-tensors": CompressedTensorsReader, "modelslim": ModelSlimReader}
# Names that users of vLLM-Ascend and SGLang know.
ALIASES = {"ascend": "modelslim", "w8a8_int8": "w8a8-dynamic"}


def choose_reader(
    checkpoint: Checkpoint, asked: str, lm_head: str = "auto"
) -> Reader | GgufCheckpoint | None:
    """Return the reader of a checkpoint's int8 weights; None: it is float and stays so.

    A GGUF file whose blocks shall stay as they are is its own reader.

    Args:
        asked: `auto` (what the checkpoint is, blocks as floats), `none`, a scheme or a format, see
            `LoadConfig.quantization`.
        lm_head: how a head is quantised as it is read, see `LoadConfig.lm_head`.

    Raises:
        ModelError: the checkpoint is quantised in a way that isn't read.
        ConfigError: what is asked contradicts what the checkpoint is; names both.
    """
    reader = _reader(checkpoint, asked)
    if lm_head in ("auto", "float"):
        return reader
    if not isinstance(reader, FloatReader):
        raise ConfigError("lm_head", lm_head, _allowed_head(reader, checkpoint.where))
    reader.head = "w8" if lm_head == "w8" else "w8a8-dynamic"
    return reader


def name_of(reader: Reader | GgufCheckpoint | None) -> str:
    """Name the quantisation that a model has when it is read so: none, gguf, or its scheme."""
    if reader is None:
        return "none"
    if isinstance(reader, FloatReader):
        return reader.scheme if reader.head is None else f"{reader.scheme} with a head in {reader.head}"
    if isinstance(reader, CompressedTensorsReader | ModelSlimReader):
        return reader.scheme or "none"
    return "gguf"


def _allowed_head(reader: Reader | GgufCheckpoint | None, where: str) -> str:
    """Say which head a model may have that is not made int8 as it is read, and what would make it so."""
    if isinstance(reader, CompressedTensorsReader | ModelSlimReader):
        return f"auto or float, since {where} is {reader.description}"
    return (
        f"auto or float where {where} is not made int8 as it is read; "
        "quantization=w8a8-dynamic or w8 beside it (--quantization) does so"
    )


def _reader(checkpoint: Checkpoint, asked: str) -> Reader | GgufCheckpoint | None:
    name = ALIASES.get(asked, asked)
    if name == "gguf":
        if not isinstance(whole_of(checkpoint), GgufCheckpoint):
            raise ConfigError("quantization", asked, f"{checkpoint.where} is no GGUF file")
        return cast(GgufCheckpoint, checkpoint)  # or a rank's share, which offers the same
    stated = stated_reader(checkpoint)
    if stated is None:
        return _of_float(checkpoint, name, asked)
    fits = {"auto", stated.scheme, next(n for n, kind in METHODS.items() if isinstance(stated, kind))}
    if name not in fits:
        raise ConfigError("quantization", asked, f"{checkpoint.where} is {stated.description}")
    return stated


def stated_reader(checkpoint: Checkpoint) -> CompressedTensorsReader | ModelSlimReader | None:
    """Return the reader of what the checkpoint says about itself; None: its weights are float."""
    config = checkpoint.config.get("quantization_config") or checkpoint.config.get("compression_config")
    whole = whole_of(checkpoint)
    if isinstance(whole, DummyCheckpoint):
        if config:
            log.warning("%s: dummy weights are float; its quantization_config is ignored", checkpoint.where)
        return None
    tensors = cast(SafetensorsCheckpoint, checkpoint)  # or a rank's share, which offers the same
    description = None
    if isinstance(whole, SafetensorsCheckpoint):
        description = description_of(Path(checkpoint.where))
        if description is not None:
            return ModelSlimReader(tensors, description)
    if not config:
        return None
    if not isinstance(config, dict):
        raise ModelError(f"{checkpoint.where}: quantization_config={config!r} is not an object with fields")
    method = config.get("quant_method")
    if method != "compressed-tensors" or not isinstance(whole, SafetensorsCheckpoint):
        known = ", ".join(METHODS)
        raise ModelError(
            f"{checkpoint.where}: quantization_config.quant_method={method!r} is not supported: {known}"
        )
    return CompressedTensorsReader(tensors, config)


def _of_float(checkpoint: Checkpoint, name: str, asked: str) -> Reader | None:
    if name in ("auto", "none"):
        return None
    if name in METHODS:
        raise ConfigError("quantization", asked, f"{checkpoint.where} is a checkpoint of float weights")
    if name == "w8a8-static":
        raise ConfigError(
            "quantization",
            asked,
            f"{checkpoint.where} has float weights, and static scales need calibration: "
            "`piecework quantize MODEL OUT --scheme w8a8-static --calibration FILE`",
        )
    scheme: Scheme = "w8" if name == "w8" else "w8a8-dynamic"
    return FloatReader(checkpoint, scheme)
