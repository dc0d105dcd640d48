"""Every GGUF type, from random block bytes, gives the values of its format's formula.

The formulas are written out here from ggml's block structs and `dequantize_row_*` functions
(ggml-common.h, ggml-quants.c), one weight at a time, in float32 as there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_blocks import random_blocks
from gguf_files import TYPES, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st

from piecework.weights.gguf.dequantise import read_rows
from piecework.weights.gguf.header import read_header
from piecework.weights.gguf.types import READABLE
from piecework.weights.mapped import MappedFile

f32 = np.float32


def half(block: bytes, place: int) -> np.float32:
    return f32(struct.unpack_from("<e", block, place)[0])


def plain(kind: str, block: bytes) -> Iterator[np.float32]:
    if kind == "F32":
        yield f32(struct.unpack("<f", block)[0])
    elif kind == "F16":
        yield half(block, 0)
    else:  # BF16: the upper half of a float32
        yield f32(struct.unpack("<f", b"\0\0" + block)[0])


def q8_0(block: bytes) -> Iterator[np.float32]:
    d = half(block, 0)
    for q in struct.unpack_from("<32b", block, 2):
        yield f32(q) * d


def q4(kind: str, block: bytes) -> Iterator[np.float32]:
    """32 weights of 4 bits: the low halves of 16 bytes, then the high halves."""
    d, m, first = (half(block, 0), half(block, 2), 4) if kind == "Q4_1" else (half(block, 0), None, 2)
    qs = block[first : first + 16]
    for q in [b & 15 for b in qs] + [b >> 4 for b in qs]:
        yield f32(q - 8) * d if m is None else f32(q) * d + m


def q5(kind: str, block: bytes) -> Iterator[np.float32]:
    """As Q4, and bit j of `qh` is the fifth bit of weight j."""
    d, m, first = (half(block, 0), half(block, 2), 4) if kind == "Q5_1" else (half(block, 0), None, 2)
    (qh,) = struct.unpack_from("<I", block, first)
    qs = block[first + 4 : first + 20]
    for j, low in enumerate([b & 15 for b in qs] + [b >> 4 for b in qs]):
        q = low | ((qh >> j & 1) << 4)
        yield f32(q - 16) * d if m is None else f32(q) * d + m


def scale_min(scales: bytes, j: int) -> tuple[int, int]:
    """Six bits of scale and of minimum for part j of 8: `get_scale_min_k4`."""
    if j < 4:
        return scales[j] & 63, scales[j + 4] & 63
    low = scales[j + 4]
    return (low & 15) | (scales[j - 4] >> 6 << 4), (low >> 4) | (scales[j] >> 6 << 4)


def q4_k_or_q5_k(kind: str, block: bytes) -> Iterator[np.float32]:
    """256 weights in 8 parts of 32; parts 2c and 2c + 1 are the low and high halves of 32 bytes."""
    d, dmin, scales = half(block, 0), half(block, 2), block[4:16]
    qh = block[16:48] if kind == "Q5_K" else None
    qs = block[48:176] if kind == "Q5_K" else block[16:144]
    for part in range(8):
        scale, minimum = scale_min(scales, part)
        d1, m1 = d * f32(scale), dmin * f32(minimum)
        for i in range(32):
            q = qs[32 * (part // 2) + i] >> (4 * (part % 2)) & 15
            if qh is not None:
                q |= (qh[i] >> part & 1) << 4
            yield d1 * f32(q) - m1


def q6_k(block: bytes) -> list[np.float32]:
    """256 weights in two halves; each has 64 bytes of low 4 bits, 32 of high 2 bits, and 8 scales."""
    d, values = half(block, 208), [f32(0)] * 256
    for h in range(2):
        ql, qh = block[64 * h : 64 * h + 64], block[128 + 32 * h : 160 + 32 * h]
        scales = struct.unpack_from("<8b", block, 192 + 8 * h)
        for i in range(32):
            lows = (ql[i] & 15, ql[i + 32] & 15, ql[i] >> 4, ql[i + 32] >> 4)
            for row, low in enumerate(lows):
                q = (low | ((qh[i] >> 2 * row & 3) << 4)) - 32
                values[128 * h + 32 * row + i] = d * f32(scales[i // 16 + 2 * row]) * f32(q)
    return values


def formula(kind: str, block: bytes) -> list[np.float32]:
    if kind in ("F32", "F16", "BF16"):
        return list(plain(kind, block))
    if kind == "Q8_0":
        return list(q8_0(block))
    if kind in ("Q4_0", "Q4_1"):
        return list(q4(kind, block))
    if kind in ("Q5_0", "Q5_1"):
        return list(q5(kind, block))
    return q6_k(block) if kind == "Q6_K" else list(q4_k_or_q5_k(kind, block))


def expected(kind: str, raw: np.ndarray, shape: tuple[int, ...]) -> torch.Tensor:
    data, size = raw.tobytes(), gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    values = [formula(kind, data[i : i + size]) for i in range(0, len(data), size)]
    return torch.from_numpy(np.array(values, np.float32).reshape(shape))


@pytest.mark.parametrize("kind", TYPES)
@given(rows=st.integers(1, 5), blocks=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=8, deadline=None)
def test_random_blocks_give_the_values_of_the_formula(
    tmp_path_factory, kind: str, rows: int, blocks: int, seed: int
) -> None:
    width = blocks * gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
    raw = random_blocks(np.random.default_rng(seed), kind, (rows, width))
    path: Path = tmp_path_factory.mktemp("formula") / "model.gguf"
    write_gguf(path, "llama", {}, {"before": np.ones(3, np.float32), "x": (raw, kind)})
    info = read_header(path).tensors["x"]
    assert READABLE[info.type].name == kind and info.shape == (rows, width)
    want = expected(kind, raw, (rows, width))
    with MappedFile(path) as file:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            out = torch.full((rows, width), torch.nan, dtype=dtype)
            read_rows(file, info.start, READABLE[info.type], out)
            assert torch.equal(out, want.to(dtype))


def test_the_listed_types_are_those_that_are_read() -> None:
    assert {kind.name for kind in READABLE.values()} == set(TYPES)
    for number, kind in READABLE.items():
        of_package = gguf.GGMLQuantizationType(number)
        assert of_package.name == kind.name
        assert gguf.GGML_QUANT_SIZES[of_package] == (kind.block, kind.size)
