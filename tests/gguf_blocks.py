"""Blocks of GGUF's quantised types for tests: random ones, and an encoder of float weights.

The `gguf` package encodes the types of 32 weights; those of 256 are encoded here, by the block structs of
ggml-common.h, with scales that fit the largest weight (llama.cpp searches for better ones).
"""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]


def random_blocks(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> Array:
    """Random bytes [rows..., row bytes] of weights of a shape, with scales that are finite."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, size), dtype=np.uint8)
    if block == 1:
        numbers = torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        return numbers.to(dtype).view(torch.uint8).numpy().reshape(*shape[:-1], shape[-1] * size)
    for place in scale_places(kind):
        scales = rng.uniform(-2, 2, raw.shape[:-1]).astype(np.float16)
        raw[..., place : place + 2] = scales[..., None].view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


def scale_places(kind: str) -> tuple[int, ...]:
    """Where in a block the float16 scales lie, from ggml's block structs (ggml-common.h)."""
    if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
        return 0, 2
    return (208,) if kind == "Q6_K" else (0,)


def encode(weights: Array, kind: str) -> Array:
    """Float weights [..., W] -> bytes of blocks [..., row bytes]."""
    if not kind.endswith("_K"):
        encoded: Array = getattr(gguf.quants, kind).quantize(weights)
        return encoded
    blocks = weights.astype(np.float32).reshape(*weights.shape[:-1], -1, 256)
    made = _q6_k(blocks) if kind == "Q6_K" else _q45_k(blocks, five=kind == "Q5_K")
    return made.reshape(*weights.shape[:-1], -1)


def _halves(x: Array) -> tuple[Array, Array]:
    """As float16 and its bytes: [...] -> float32 [..., 1] and uint8 [..., 2]."""
    half = x.astype(np.float16)[..., None]
    return half.astype(np.float32), np.ascontiguousarray(half).view(np.uint8)


def _ratio(x: Array, y: Array) -> Array:
    return np.divide(x, y, out=np.zeros(np.broadcast_shapes(x.shape, y.shape), np.float32), where=y != 0)


def _q45_k(blocks: Array, five: bool) -> Array:
    parts = blocks.reshape(*blocks.shape[:-1], 8, 32)
    low = np.maximum(0, -parts.min(-1))
    d, d_bytes = _halves((parts.max(-1) + low).max(-1) / (31 if five else 15) / 63)
    m, m_bytes = _halves(low.max(-1) / 63)
    s = np.clip(np.ceil(_ratio((parts.max(-1) + low) / (31 if five else 15), d)), 0, 63)
    t = np.clip(np.round(_ratio(low, m)), 0, 63)
    q = np.round(_ratio(parts + (m * t)[..., None], (d * s)[..., None]))
    q = np.clip(q, 0, 31 if five else 15).astype(np.uint8)
    s, t = s.astype(np.uint8), t.astype(np.uint8)
    scales = (
        s[..., :4] | (s[..., 4:] >> 4 << 6),
        t[..., :4] | (t[..., 4:] >> 4 << 6),
        (s[..., 4:] & 15) | ((t[..., 4:] & 15) << 4),
    )
    pairs = (q[..., 0::2, :] & 15) | ((q[..., 1::2, :] & 15) << 4)
    upper = [np.bitwise_or.reduce((q >> 4) << np.arange(8, dtype=np.uint8)[:, None], -2)] if five else []
    return np.concatenate((d_bytes, m_bytes, *scales, *upper, pairs.reshape(*pairs.shape[:-2], 128)), -1)


def _q6_k(blocks: Array) -> Array:
    parts = blocks.reshape(*blocks.shape[:-1], 16, 16)
    scale = np.abs(parts).max(-1) / 31
    d, d_bytes = _halves(scale.max(-1) / 127)
    s = np.clip(np.ceil(_ratio(scale, d)), 0, 127)
    q = np.clip(np.round(_ratio(parts, (d * s)[..., None])), -32, 31) + 32
    q = q.astype(np.uint8).reshape(*blocks.shape[:-1], 2, 2, 64)
    low = (q[..., 0, :] & 15) | ((q[..., 1, :] & 15) << 4)
    fours = q.reshape(*blocks.shape[:-1], 2, 4, 32) >> 4
    high = np.bitwise_or.reduce(fours << np.array([[0], [2], [4], [6]], np.uint8), -2)
    flat = [x.reshape(*blocks.shape[:-1], -1) for x in (low, high)]
    return np.concatenate((*flat, s.astype(np.int8).view(np.uint8), d_bytes), -1)
