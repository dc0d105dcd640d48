"""Tensors of a GGUF file come step by step as they would at once, and q and k rows are put back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import quants
from gguf_blocks import random_blocks
from gguf_files import interleave, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st

from piecework.errors import ModelError
from piecework.native import library
from piecework.ops.block_packing import pack_blocks, packed_shape
from piecework.ops.cpu.kernels import FLOATS
from piecework.weights.gguf import native
from piecework.weights.gguf.dequantise import STEP, read_rows, restore_halves
from piecework.weights.gguf.header import read_header
from piecework.weights.gguf.types import READABLE
from piecework.weights.mapped import RELEASE, MappedFile


@given(heads=st.integers(1, 5), half=st.integers(1, 9), width=st.integers(1, 7))
@settings(max_examples=50, deadline=None)
def test_restore_halves_undoes_the_converter(heads: int, half: int, width: int) -> None:
    rows = torch.arange(heads * 2 * half * width).view(-1, width)
    written = torch.from_numpy(interleave(rows.numpy(), heads))
    assert torch.equal(restore_halves(written, 2 * half), rows)


def test_restore_halves_in_numbers() -> None:
    # One head of 6 rows: the converter writes a0 b0 a1 b1 a2 b2 for the halves a and b.
    written = torch.tensor([[0], [10], [1], [11], [2], [12]])
    assert restore_halves(written, 6).flatten().tolist() == [0, 1, 2, 10, 11, 12]


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "F16"])
def test_many_steps_give_what_one_gives(tmp_path: Path, kind: str) -> None:
    rows, width = 1000, 768
    assert rows * width > 5 * STEP
    raw = random_blocks(np.random.default_rng(5), kind, (rows, width))
    info = read_header(write_gguf(tmp_path / "m.gguf", "llama", {}, {"x": (raw, kind)})).tensors["x"]
    whole = quants.dequantize(raw, info.type)
    out = torch.empty(rows, width)
    with MappedFile(tmp_path / "m.gguf") as file:
        read_rows(file, info.start, READABLE[info.type], out)
    assert torch.equal(out, torch.from_numpy(whole))


@pytest.mark.parametrize("shape", [(3072, 512), (3072,)])
def test_heads_are_not_torn_by_steps(tmp_path: Path, shape: tuple[int, ...]) -> None:
    rows = np.random.default_rng(1).standard_normal(shape, dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", "llama", {}, {"x": interleave(rows, 32)})
    info = read_header(path).tensors["x"]
    out = torch.empty(shape)
    with MappedFile(path) as file:
        read_rows(file, info.start, READABLE[info.type], out, head_dim=96)
    assert torch.equal(out, torch.from_numpy(rows))


def test_a_mapped_file_copies_and_gives_pages_back(tmp_path: Path) -> None:
    data = np.random.default_rng(2).integers(0, 256, 4 * RELEASE, dtype=np.uint8)
    path = tmp_path / "data"
    data.tofile(path)

    def resident() -> int:
        lines = Path("/proc/self/smaps").read_text().splitlines()
        start = next(i for i, line in enumerate(lines) if line.endswith(str(path)))
        return 1024 * next(int(x.split()[1]) for x in lines[start:] if x.startswith("Rss:"))

    most = 0
    with MappedFile(path) as file:
        for start in range(0, len(data), RELEASE // 4):
            assert np.array_equal(file.copy(start, RELEASE // 4), data[start : start + RELEASE // 4])
            if Path("/proc/self/smaps").exists():
                most = max(most, resident())
    assert most <= 1.5 * RELEASE


@pytest.mark.parametrize("content", [None, b""])
def test_a_file_that_cannot_be_mapped_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "x").write_bytes(content)
    with pytest.raises(ModelError, match=str(tmp_path / "x")):
        MappedFile(tmp_path / "x")


@pytest.mark.skipif(library() is None, reason="there are no kernels")
@pytest.mark.parametrize("kind", native.KINDS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("head_dim", [None, 6])
def test_the_kernel_gives_what_numpy_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype, head_dim: int | None
) -> None:
    rows, width = 18, 96
    raw = random_blocks(np.random.default_rng(7), kind, (rows, width))
    info = read_header(write_gguf(tmp_path / "m.gguf", "llama", {}, {"x": (raw, kind)})).tensors["x"]
    monkeypatch.setattr(native, "STEP", raw.nbytes // 2)  # two calls, with whole heads in each
    by_kernel, by_numpy = torch.empty(rows, width, dtype=dtype), torch.empty(rows, width, dtype=dtype)
    assert native.supports(READABLE[info.type], by_kernel)
    with MappedFile(tmp_path / "m.gguf") as file:
        read_rows(file, info.start, READABLE[info.type], by_kernel, head_dim)
        monkeypatch.setattr(native, "supports", lambda kind, out: False)
        read_rows(file, info.start, READABLE[info.type], by_numpy, head_dim)
    assert by_kernel.equal(by_numpy)
    assert by_kernel.count_nonzero() > rows * width / 2


@pytest.mark.skipif(library() is None, reason="there are no kernels")
@pytest.mark.parametrize("kind", native.KINDS)
def test_the_kernel_packs_as_torch_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Two matrices in one, the first of them with interleaved heads, and rows that fill no whole group."""
    width, heads = 96, 3 * 6
    parts = {n: random_blocks(np.random.default_rng(i), kind, (n, width)) for i, n in enumerate((heads, 11))}
    path = write_gguf(tmp_path / "m.gguf", "llama", {}, {f"x{n}": (raw, kind) for n, raw in parts.items()})
    tensors = read_header(path).tensors
    monkeypatch.setattr(native, "STEP", parts[heads].nbytes // 2)
    packed = torch.zeros(packed_shape(heads + 11, width, kind), dtype=torch.uint8)
    with MappedFile(path) as file:
        for n, at, head_dim in ((heads, 0, 6), (11, heads, None)):
            info = tensors[f"x{n}"]
            native.pack_rows(file, info.start, READABLE[info.type], packed, n, at, head_dim)
    rows = [restore_halves(torch.from_numpy(parts[heads]), 6), torch.from_numpy(parts[11])]
    assert packed.equal(pack_blocks(torch.cat(rows), kind))
