"""Folders with safetensors: one file or shards, every dtype, and clear errors for bad ones."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rss import run_measured
from safetensors.torch import save_file
from tiny import save_tiny
from torch import Tensor

from piecework.errors import ModelError
from piecework.weights.safetensors import INDEX, SafetensorsCheckpoint

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32}
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def folder_with(folder: Path, tensors: dict[str, Tensor], name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, folder / name)
    return folder


def sharded(folder: Path, shards: dict[str, dict[str, Tensor]]) -> Path:
    weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
    for shard, tensors in shards.items():
        folder_with(folder, tensors, shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def read(checkpoint: SafetensorsCheckpoint, name: str, dtype: torch.dtype) -> Tensor:
    out = torch.empty(checkpoint.shape(name), dtype=dtype)
    checkpoint.read(name, out)
    return out


@given(
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    stored=st.sampled_from(FLOATS),
    wanted=st.sampled_from(FLOATS[1:]),
)
@settings(max_examples=25, deadline=None)
def test_what_is_saved_is_read(tmp_path_factory, shape: list[int], stored: Any, wanted: Any) -> None:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(stored)
    folder = folder_with(tmp_path_factory.mktemp("st"), {"other": torch.ones(3), "x": value})
    checkpoint = SafetensorsCheckpoint(folder)
    assert set(checkpoint.names()) == {"x", "other"} and checkpoint.shape("x") == tuple(shape)
    assert torch.equal(read(checkpoint, "x", wanted), value.to(wanted))
    checkpoint.close()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_other_dtypes_are_read_as_they_are(tmp_path: Path, dtype: torch.dtype) -> None:
    value = torch.arange(10).view(2, 5).to(dtype)
    checkpoint = SafetensorsCheckpoint(folder_with(tmp_path, {"x": value}))
    assert torch.equal(read(checkpoint, "x", dtype).view(torch.uint8), value.view(torch.uint8))
    if not dtype.is_floating_point:
        with pytest.raises(ModelError, match=r"model\.safetensors: tensor x has dtype .*float32"):
            read(checkpoint, "x", torch.float32)


def test_a_large_tensor_is_read_in_steps_into_part_of_another(tmp_path: Path) -> None:
    value = torch.randn(1500, 2048)
    checkpoint = SafetensorsCheckpoint(folder_with(tmp_path, {"x": value}))
    whole = torch.zeros(2, 1600, 2048)
    checkpoint.read("x", whole[1, 50:1550])
    assert torch.equal(whole[1, 50:1550], value)
    assert not whole[0].any() and not whole[1, :50].any() and not whole[1, 1550:].any()


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    first, second = {"a": torch.ones(2, 3)}, {"b": torch.zeros(4), "c": torch.arange(3.0)}
    checkpoint = SafetensorsCheckpoint(sharded(tmp_path, {"1.safetensors": first, "2.safetensors": second}))
    assert sorted(checkpoint.names()) == ["a", "b", "c"]
    for name, value in (first | second).items():
        assert torch.equal(read(checkpoint, name, torch.float32), value)


def test_only_what_the_index_lists_is_taken(tmp_path: Path) -> None:
    sharded(tmp_path, {"1.safetensors": {"a": torch.ones(2), "b": torch.ones(2)}})
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "1.safetensors"}}))
    assert SafetensorsCheckpoint(tmp_path).names() == ["a"]


def test_transformers_own_shards(tmp_path: Path) -> None:
    from tiny import tiny_model

    model = tiny_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert set(checkpoint.names()) == set(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(read(checkpoint, name, torch.float32), value)


def test_the_config_has_defaults_filled_in(tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(folder_with(tmp_path, {"x": torch.ones(1)}))
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    assert checkpoint.config["rms_norm_eps"] == 1e-6  # not in the file
    assert checkpoint.generation_config == {}


def test_generation_config_is_read(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7], "temperature": 0.6}')
    assert SafetensorsCheckpoint(folder).generation_config == {"eos_token_id": [2, 7], "temperature": 0.6}


def test_an_unknown_model_type_gives_the_file_as_it_is(tmp_path: Path, caplog) -> None:
    folder = folder_with(tmp_path, {"x": torch.ones(1)})
    strange = {"model_type": "new_thing", "architectures": ["NewForCausalLM"], "width": 3}
    (folder / "config.json").write_text(json.dumps(strange))
    with caplog.at_level("WARNING"):
        assert SafetensorsCheckpoint(folder).config == strange
    assert "its defaults are not filled in" in caplog.text


def test_code_that_a_folder_brings_is_not_run(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {"x": torch.ones(1)})
    mark = tmp_path / "was run"
    (folder / "configuration_evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass Evil: ...\n")
    config = {"model_type": "evil", "auto_map": {"AutoConfig": "configuration_evil.Evil"}}
    (folder / "config.json").write_text(json.dumps(config))
    assert SafetensorsCheckpoint(folder).config == config
    assert not mark.exists()


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    sharded(tmp_path, {"1.safetensors": {"a": torch.ones(2)}, "2.safetensors": {"b": torch.ones(2)}})
    (tmp_path / "2.safetensors").unlink()
    with pytest.raises(
        ModelError, match=r"shards of model\.safetensors\.index\.json are missing: 2\.safetensors"
    ):
        SafetensorsCheckpoint(tmp_path)


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    sharded(tmp_path, {"1.safetensors": {"a": torch.ones(2)}})
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "1.safetensors"}}))
    with pytest.raises(ModelError, match=r"1\.safetensors: lacks tensors that the index places in it: b"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": {"a": "../1.safetensors"}}'])
def test_a_bad_index_is_named(tmp_path: Path, index: str) -> None:
    sharded(tmp_path, {"1.safetensors": {"a": torch.ones(2)}})
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(ModelError, match=INDEX):
        SafetensorsCheckpoint(tmp_path)


def header(value: Any) -> bytes:
    text = json.dumps(value).encode()
    return struct.pack("<Q", len(text)) + text


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"1234", "it has only 4 bytes"),
        (struct.pack("<Q", 10**9) + b"{}", "its header would take 1000000000 bytes"),
        (struct.pack("<Q", 2) + b"{!", "its header cannot be read"),
        (header([1]), "its header cannot be read"),
        (header({"x": {"dtype": "F32"}}), "its header cannot be read"),
        (header({"x": GOOD}) + b"1234567", "truncated: tensor x ends at byte"),
        (
            header({"x": {**GOOD, "dtype": "F4"}}) + b"12345678",
            "tensor x is of dtype F4, which is not supported",
        ),
        (header({"x": {**GOOD, "shape": [3]}}) + b"12345678", r"tensor x of shape [3] has 8 bytes"),
    ],
)
def test_a_bad_file_is_named_with_its_fault(tmp_path: Path, content: bytes, message: str) -> None:
    folder = folder_with(tmp_path, {"x": torch.ones(2)})
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError) as error:
        SafetensorsCheckpoint(folder)
    assert "model.safetensors" in str(error.value) and message in str(error.value)


def test_pickles_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ModelError, match=r"has no weights: neither model\.safetensors nor"):
        SafetensorsCheckpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="pickled weights"):
        SafetensorsCheckpoint(tmp_path)


def test_a_wrong_shape_or_name_is_named(tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(folder_with(tmp_path, {"x": torch.ones(2, 3)}))
    with pytest.raises(ModelError, match=r"tensor x has shape \[2, 3\], not \[3, 2\]"):
        checkpoint.read("x", torch.empty(3, 2))
    with pytest.raises(ModelError, match="the tensor y is missing"):
        checkpoint.shape("y")


@pytest.mark.slow
def test_reading_holds_neither_the_file_nor_a_copy_of_it(tmp_path: Path) -> None:
    size = 160 * 2**20
    folder = folder_with(tmp_path, {"x": torch.zeros(size // 4)})
    peak = run_measured(
        f"""
        import torch
        from piecework.weights.safetensors import SafetensorsCheckpoint
        checkpoint = SafetensorsCheckpoint({str(folder)!r})
        """,
        """
        out = torch.empty(checkpoint.shape("x"), dtype=torch.bfloat16)
        checkpoint.read("x", out)
        """,
    )
    assert 0.9 * size / 2 < peak <= 1.25 * size / 2, f"{peak / 2**20:.0f} MiB"
