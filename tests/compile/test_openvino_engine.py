"""The engine over OpenVINO's pieces: the tokens of the eager engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openvino", reason="the package openvino is not installed")

from reference import compare_greedy, load_reference
from tiny import save_tiny

from piecework import LLM
from piecework.compile.openvino.piece import OpenVinoPiece
from piecework.devices.openvino import core
from piecework.errors import DeviceError

PROMPTS = [[5, 9, 200], [17] * 21, [3, 4, 5, 6, 7, 8, 9]]
SLOW = pytest.mark.slow


def answer(model: str, device: str, **settings: Any) -> tuple[list[list[int]], set[str], int]:
    """Greedy tokens, who compiled the pieces of body and head, and the number of OpenVINO's models."""
    with LLM(model, device=device, dtype="float32", **settings) as llm:
        found = llm.generate(PROMPTS, temperature=0.0, max_tokens=12, ignore_eos=True)
        programs = llm.service.runner.programs
        assert programs.body.opaque_reason is None and programs.counters.recompiles == 0
        pieces = [*programs.body.pieces, *programs.head.pieces]
        models = sum(piece.models for piece in pieces if isinstance(piece, OpenVinoPiece))
        return [list(r.token_ids) for r in found], {piece.compiler for piece in pieces}, models


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("llama", None),
        pytest.param("qwen2", None, marks=SLOW),
        pytest.param("qwen3", None, marks=SLOW),
        pytest.param("qwen3_moe", None, marks=SLOW),
        pytest.param("llama", "w8a8-dynamic", marks=SLOW),
        pytest.param("qwen3", "w8a8-dynamic", marks=SLOW),
        pytest.param("llama", "w8", marks=SLOW),
    ],
)
def test_tokens_are_those_of_the_eager_engine(name: str, scheme: str | None, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", name)
    settings: dict[str, Any] = {"compile_cache_dir": str(tmp_path / "cache")}
    quantised = {} if scheme is None else {"quantization": scheme}
    tokens, compilers, models = answer(
        str(folder), "openvino:CPU", compilation_config={**settings, "strict": True}, **quantised
    )
    layers = 4 if name == "qwen3_moe" else 3
    assert compilers == {"openvino"} and models == layers + 1 + 1  # a model for each call, and the head
    eager, compilers, _ = answer(
        str(folder), "cpu", compilation_config={**settings, "compiler": "eager"}, **quantised
    )
    assert compilers == {"eager"}
    if scheme is None:
        assert compare_greedy(load_reference(folder), PROMPTS, tokens).wrong == []
    assert tokens == eager


def test_the_host_s_device_may_have_its_pieces_from_openvino(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "llama", num_hidden_layers=1)
    config = {"compile_cache_dir": str(tmp_path), "compiler": "openvino"}
    tokens, compilers, models = answer(str(folder), "cpu", compilation_config=config)
    assert compilers == {"openvino"} and models == 3
    assert compare_greedy(load_reference(folder), PROMPTS, tokens).wrong == []


def test_an_npu_that_is_not_there_hands_over(tmp_path: Path) -> None:
    if any(found.startswith("NPU") for found in core().available_devices):
        pytest.skip("this machine has an NPU")
    folder = str(save_tiny(tmp_path / "model", "llama", num_hidden_layers=1))
    config = {"compile_cache_dir": str(tmp_path)}
    devices = "openvino:NPU,openvino:CPU"
    tokens, compilers, _ = answer(folder, devices, compilation_config=config)
    assert compilers == {"openvino"}
    assert compare_greedy(load_reference(Path(folder)), PROMPTS, tokens).wrong == []
    for alone in ({"device": "openvino:NPU"}, {"device": devices, "failover": "off"}):
        with pytest.raises(DeviceError, match=r"device openvino:NPU failed at compile: .+"):
            LLM(folder, dtype="float32", compilation_config=config, **alone)


@SLOW
def test_the_default_model(tmp_path: Path) -> None:
    """In float32: int8 rounds inputs, so that a last bit apart there changes tokens later."""
    settings: dict[str, Any] = {"max_model_len": 512}
    config = {"compile_cache_dir": str(tmp_path)}
    tokens, compilers, models = answer(
        "smollm2-135m", "openvino:CPU", compilation_config={**config, "strict": True}, **settings
    )
    assert compilers == {"openvino"} and models == 32
    eager, _, _ = answer(
        "smollm2-135m", "cpu", compilation_config={**config, "compiler": "eager"}, **settings
    )
    assert tokens == eager
