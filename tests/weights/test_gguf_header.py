"""GGUF headers: what is read, how it is cached, and that a bad file is always a clear error."""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from gguf_blocks import random_blocks
from gguf_files import write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st

from piecework.errors import ModelError
from piecework.weights.gguf.header import LONG_ARRAY, read_header, short_header

TOKENS = [f"token {i}" for i in range(LONG_ARRAY + 1)]


def example(path: Path) -> Path:
    rng = np.random.default_rng(0)
    metadata = {
        "llama.block_count": 2,
        "llama.rope.freq_base": 1e4,
        "general.name": "Größe 日本",
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [1] * len(TOKENS),
        "some.numbers": [1.5, 2.5],
    }
    tensors = {
        "token_embd.weight": (random_blocks(rng, "Q4_K", (7, 512)), "Q4_K"),
        "output_norm.weight": np.ones(5, np.float32),
        "blk.0.ffn_gate_exps.weight": (random_blocks(rng, "Q8_0", (3, 4, 32)), "Q8_0"),
    }
    return write_gguf(path, "llama", metadata, tensors)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return example(tmp_path_factory.mktemp("header") / "model.gguf")


def test_values_and_places_are_those_of_the_packages_reader(file: Path) -> None:
    header, reader = read_header(file), GGUFReader(file)
    theirs = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert header.metadata == theirs
    assert header.architecture == "llama"
    assert list(header.tensors) == [t.name for t in reader.tensors]
    for tensor in reader.tensors:
        info = header.tensors[tensor.name]
        assert info.type == tensor.tensor_type
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.start, info.nbytes) == (tensor.data_offset, tensor.n_bytes)


def test_the_short_header_leaves_out_long_arrays_and_is_cached(file: Path, tmp_path: Path) -> None:
    full, first = read_header(file), short_header(file, tmp_path)
    left_out = {"tokenizer.ggml.tokens", "tokenizer.ggml.token_type"}
    assert first.metadata == {k: v for k, v in full.metadata.items() if k not in left_out}
    assert first.tensors == full.tensors
    (stored,) = tmp_path.rglob("header.json")
    before = stored.stat().st_mtime_ns
    assert short_header(file, tmp_path) == first
    assert stored.stat().st_mtime_ns == before
    assert [p.name for p in stored.parent.iterdir()] == ["header.json"], "no temporary file stays"


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", "llama", {"general.name": "old"}, {"x": np.ones(4, np.float32)})
    assert short_header(file, tmp_path).metadata["general.name"] == "old"
    write_gguf(file, "llama", {"general.name": "new"}, {"x": np.ones(4, np.float32)})
    os.utime(file, ns=(1, 1))  # in case the disk's clock is coarse
    assert short_header(file, tmp_path).metadata["general.name"] == "new"


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"metadata": 1}', '{"metadata": {}, "tensors": {"x": {}}}']
)
def test_a_damaged_cache_is_made_again(file: Path, tmp_path: Path, content: str) -> None:
    right = short_header(file, tmp_path)
    (stored,) = tmp_path.rglob("header.json")
    stored.write_text(content)
    assert short_header(file, tmp_path) == right
    assert len(stored.read_text()) > 100


def test_a_cache_that_cannot_be_written_is_no_error(file: Path, tmp_path: Path) -> None:
    place = tmp_path / "a file, not a folder"
    place.write_text("")
    assert short_header(file, place).tensors == read_header(file).tensors


def test_an_end_of_turn_token_is_found_in_the_vocabulary(tmp_path: Path) -> None:
    tokens = [*TOKENS, "<|im_end|>"]
    kinds = [1] * len(TOKENS) + [3]
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    file = write_gguf(tmp_path / "m.gguf", "llama", metadata, {"x": np.ones(4, np.float32)})
    assert short_header(file, tmp_path).metadata["tokenizer.ggml.eot_token_id"] == len(TOKENS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b"GGML" + b[4:], "not a GGUF file: it starts with b'GGML'"),
        (lambda b: b"{}", "not a GGUF file"),
        (lambda b: b"", "cannot be read"),
        (lambda b: b[:4] + struct.pack("<I", 1) + b[8:], "GGUF version 1 is not supported: 2 or 3"),
        (lambda b: b[:4] + struct.pack(">I", 3) + b[8:], "big-endian files are not read"),
        (lambda b: b[:20], "truncated: the header needs byte 24"),
        (lambda b: b[:-100], "truncated: tensor blk.0.ffn_gate_exps.weight ends at byte"),
        (lambda b: b.replace(b"token_embd.weight", b"token_\xff\xff\xff\xff.weight"), "damaged"),
    ],
)
def test_a_bad_file_is_named_with_its_fault(file: Path, tmp_path: Path, change, message: str) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(change(file.read_bytes()))
    with pytest.raises(ModelError) as error:
        read_header(bad)
    assert str(bad) in str(error.value) and message in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for read in (read_header, short_header):
        with pytest.raises(ModelError, match="no such file"):
            read(tmp_path / "none.gguf")


def test_a_file_may_be_read_only(file: Path) -> None:
    file.chmod(stat.S_IRUSR)
    assert read_header(file).architecture == "llama"


@given(share=st.floats(0, 1, exclude_max=True))
@settings(max_examples=80, deadline=None)
def test_a_file_cut_anywhere_is_a_model_error(file: Path, tmp_path_factory, share: float) -> None:
    end = max(t.start + (t.nbytes or 0) for t in read_header(file).tensors.values())
    cut = tmp_path_factory.mktemp("cut") / "m.gguf"
    cut.write_bytes(file.read_bytes()[: int(share * end)])
    with pytest.raises(ModelError, match=str(cut)):
        read_header(cut)


@given(changes=st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_a_damaged_header_is_read_or_refused_and_nothing_else(file: Path, tmp_path_factory, changes) -> None:
    data = bytearray(file.read_bytes())
    places = [*range(200), *range(len(data) - 4200, len(data))]  # not the tokens in the middle
    for place, value in changes:
        data[places[place % len(places)]] = value
    bad = tmp_path_factory.mktemp("damaged") / "m.gguf"
    bad.write_bytes(data)
    try:
        read_header(bad)
    except ModelError as error:
        assert str(bad) in str(error)
