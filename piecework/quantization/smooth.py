"""Moves outlying channels of a linear's input into its weight, before both become int8 (SmoothQuant).

Xiao et al., 2022, arXiv:2211.10438: W x = (W diag(s)) (diag(1/s) x), and 1/s goes into the weight of the
norm that makes x. The float function stays the same and a run costs nothing more. Only norms are made use
of: with the default model, moving channels of `down_proj`'s input into the rows of `up_proj` gained nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from piecework.errors import ModelError
from piecework.models.decoder import CausalLM
from piecework.quantization.calibrate import run_samples
from piecework.quantization.smoothed import Smoothed, read_float
from piecework.quantization.targets import Target
from piecework.weights.checkpoint import Checkpoint

log = logging.getLogger("piecework.load")

# A linear of the model, and the norm before it. There is no `gate_up_proj` in a mixture of experts, whose
# norm is read by a float router too.
NORMS = {"self_attn.qkv_proj": "input_layernorm", "mlp.gate_up_proj": "post_attention_layernorm"}
_LEAST = 1e-4  # of a share or of a column, so that a channel of zeros has a scale too


def norm_before(linear: str) -> str | None:
    """Name the norm that makes the input of a linear of the model; None: there is none."""
    for name, norm in NORMS.items():
        if linear.endswith(f".{name}"):
            return linear.removesuffix(name) + norm
    return None


def channel_shares(
    model: CausalLM,
    samples: Sequence[Sequence[int]],
    linears: Sequence[str],
    step: Callable[[], None] = lambda: None,
) -> dict[str, Tensor]:
    """Return, by linear, the largest share |x_k| / max|x| that each channel [K] has of a token's range.

    Shares and not sizes, since a token has a scale of its own: in many models the first token's are a
    thousand times those of the others. `step` is called after each sample. ModelError: an input isn't finite.
    """
    shares: dict[str, Tensor] = {}

    def taker(name: str) -> Callable[[Tensor], None]:
        def take(x: Tensor) -> None:
            size = x.float().abs()
            found = (size / size.amax(-1, keepdim=True).clamp_min(1e-30)).amax(0)
            shares[name] = torch.maximum(shares[name], found) if name in shares else found

        return take

    run_samples(model, samples, {name: taker(name) for name in linears}, step)
    for name, found in shares.items():
        if not bool(found.isfinite().all()):
            raise ModelError(f"the input of {name} can't be smoothed: it holds values that are not finite")
    return shares


def scales(shares: Tensor, weight: Tensor, strength: float) -> Tensor:
    """s_k = shares_k ^ a / weight_k ^ (1 - a), over their geometric mean; a = strength, 0 to 1.

    shares, weight [K]: what a channel takes of its tokens' range, and the largest |w| of its column.
    """
    shares, weight = (x / x.amax().clamp_min(1e-30) for x in (shares, weight))
    s = shares.clamp_min(_LEAST) ** strength / weight.clamp_min(_LEAST) ** (1 - strength)
    return s / s.log().mean().exp()


def smooth(
    checkpoint: Checkpoint, targets: Sequence[Target], shares: Mapping[str, Tensor], strength: float
) -> Smoothed:
    """Return `checkpoint` with the inputs of those `targets` smoothed that have shares."""
    smoothed = Smoothed(checkpoint)
    for target in targets:
        norm = norm_before(target.name)
        if norm is None or target.name not in shares:
            continue
        linears = [part.linear for part in target.parts]
        largest = torch.stack(
            [read_float(checkpoint, f"{linear}.weight").abs_().amax(0) for linear in linears]
        ).amax(0)
        smoothed.move(norm, linears, scales(shares[target.name].cpu(), largest, strength))
    log.info("%s: the inputs of %d linears are smoothed", checkpoint.where, len(smoothed.moved))
    return smoothed
