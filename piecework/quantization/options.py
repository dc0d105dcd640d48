"""What `piecework quantize` can be told, and which of it goes together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from piecework.errors import ConfigError
from piecework.quantization.reader import SCHEMES, Scheme

DEFAULT_SAMPLES = 32
DEFAULT_MAX_TOKENS = 512
DEFAULT_SMOOTH = 0.75
DEFAULT_MAX_ERROR = 0.1


@dataclass(frozen=True)
class Options:
    """How to quantise.

    Attributes:
        calibration: a file of texts; needed for static inputs, and for inputs to be smoothed.
        samples, max_tokens: how many texts are read, and how much of each.
        smooth: how much of their channels' differences inputs leave to weights, 0 (nothing) to 1.
        percentile: of the tokens' ranges that a static range holds.
        asymmetric: static inputs have an offset.
        keep_dynamic: linears of these names stay dynamic: `*` and `?` stand for anything, `re:` makes it a
            regular expression.
        max_error: a linear whose calibrated input loses more than this, relative to its size, in the mean
            token stays dynamic; None: none does.
        dtype: of the weights that stay float; None: as stored, bfloat16 of a GGUF file.
    """

    scheme: Scheme
    calibration: str | None = None
    samples: int = DEFAULT_SAMPLES
    max_tokens: int = DEFAULT_MAX_TOKENS
    smooth: float = DEFAULT_SMOOTH
    percentile: float = 100.0
    asymmetric: bool = False
    keep_dynamic: Sequence[str] = ()
    max_error: float | None = DEFAULT_MAX_ERROR
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise ConfigError("scheme", self.scheme, "one of " + ", ".join(SCHEMES))
        static = self.scheme == "w8a8-static"
        if static and self.calibration is None:
            raise ConfigError("calibration", None, "a file of texts, which w8a8-static needs")
        if self.scheme == "w8" and self.calibration is not None:
            raise ConfigError("calibration", self.calibration, "none: w8 needs no calibration")
        if self.calibration is None:
            self._refuse(("samples", "max_tokens", "smooth"), "with a calibration")
        if not static:
            self._refuse(("percentile", "asymmetric", "keep_dynamic", "max_error"), "with w8a8-static")
        if self.samples < 1 or self.max_tokens < 1:
            raise ConfigError("samples", (self.samples, self.max_tokens), "at least one sample and token")
        if not 0 <= self.smooth <= 1:
            raise ConfigError("smooth", self.smooth, "from 0 to 1")
        if not 50 < self.percentile <= 100:
            raise ConfigError("percentile", self.percentile, "above 50 and at most 100")
        if self.max_error is not None and not self.max_error > 0:
            raise ConfigError("max_error", self.max_error, "a positive number")

    def _refuse(self, names: Sequence[str], only: str) -> None:
        """What says how to calibrate would do nothing, unnoticed."""
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name in names and value != option.default:
                allowed = f"only {only}; this is {self.scheme}"
                raise ConfigError(option.name, list(value) if isinstance(value, tuple) else value, allowed)
