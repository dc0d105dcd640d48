"""A program from the disk is the one that was stored, and is refused or missing where it would not be."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import inputs_of, random_model
from tiny import save_tiny

from piecework import LLM
from piecework.compile.source import ByCall, read, spell
from piecework.devices import make_device
from piecework.graph.counters import Counters
from piecework.graph.program import Program
from piecework.graph.stored import ProgramStore, _digest

SIM: dict[str, Any] = {"device": "sim", "num_pages": 32, "max_num_seqs": 2, "max_num_batched_tokens": 4}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
PROMPT = [5, 9, 11]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), "qwen3")


def answer(folder: Path, cache: Path, **settings: Any) -> tuple[list[int], dict[str, int]]:
    chosen = {"compilation_config": {"compile_cache_dir": str(cache)}, "dtype": "float32", **settings}
    with LLM(str(folder), **chosen) as llm:
        tokens = llm.generate([PROMPT], **GREEDY)[0].token_ids
        return list(tokens), llm.service._engine._runner.programs.counters.snapshot()


def stored(cache: Path) -> list[Path]:
    return sorted((cache / "programs").glob("*.json"))


class First:
    """What a first start leaves and says; one for each compiler."""

    def __init__(self, folder: Path, places: pytest.TempPathFactory) -> None:
        self._folder, self._places = folder, places
        self._made: dict[str, tuple[Path, list[int], dict[str, int]]] = {}

    def leave(self, cache: Path, compiler: str = "auto") -> tuple[list[int], dict[str, int]]:
        """Leave its programs in `cache`; return its tokens and counts."""
        if compiler not in self._made:
            place = self._places.mktemp("first")
            settings = {"compile_cache_dir": str(place), "compiler": compiler}
            self._made[compiler] = (place, *answer(self._folder, place, compilation_config=settings))
        place, tokens, counts = self._made[compiler]
        shutil.copytree(place, cache, dirs_exist_ok=True)
        return tokens, counts


@pytest.fixture(scope="module")
def first(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> First:
    return First(folder, tmp_path_factory)


@pytest.mark.parametrize("settings", [{}, SIM], ids=["cpu", "sim"])
def test_the_second_start_takes_it_and_gives_the_same(
    folder: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    first, made = answer(folder, tmp_path, **settings)
    assert made["stored_programs"] == 0 and len(stored(tmp_path)) == 2
    second, taken = answer(folder, tmp_path, **settings)
    assert second == first
    assert taken["stored_programs"] == 1
    shape = ("traces", "pieces", "holes", "distinct")
    assert {name: taken[name] for name in shape} == {name: made[name] for name in shape}
    assert taken["replays"] == made["replays"] and taken["captures"] == made["captures"]


def test_a_start_from_the_disk_imports_no_tracer(folder: Path, first: First, tmp_path: Path) -> None:
    first.leave(tmp_path)
    code = f"""
import sys
from piecework import LLM
compilation = {{"compile_cache_dir": {str(tmp_path)!r}}}
with LLM({str(folder)!r}, dtype="float32", compilation_config=compilation) as llm:
    assert llm.service._engine._runner.programs.counters.stored_programs == 1
print(*(name for name in ("sympy", "torch._dynamo", "torch._inductor") if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize(
    "changed",
    [
        {"compilation_config": {"disable_passes": ["add_rms_norm"]}},
        {"compilation_config": {"strict": True}},
        {"dtype": "bfloat16"},
        SIM,
    ],
    ids=["passes", "strict", "dtype", "device"],
)
def test_other_settings_get_another_program(
    folder: Path, first: First, tmp_path: Path, changed: dict[str, Any]
) -> None:
    first.leave(tmp_path)
    before = stored(tmp_path)
    changed = {**changed}
    changed["compilation_config"] = {
        "compile_cache_dir": str(tmp_path),
        **changed.get("compilation_config", {}),
    }
    _, counts = answer(folder, tmp_path, **changed)
    assert counts["stored_programs"] == 0 and len(stored(tmp_path)) == len(before) + 2


def test_verified_passes_run_every_time(folder: Path, tmp_path: Path) -> None:
    settings = {"compilation_config": {"compile_cache_dir": str(tmp_path), "verify_passes": True}}
    for _ in range(2):
        _, counts = answer(folder, tmp_path, **settings)
        assert counts["stored_programs"] == 0 and counts["traces"] == 1


@pytest.mark.parametrize(
    "damage", ["no step", "truncated", "no piece", "no counts", "other weight", "op", "kernel", "no content"]
)
def test_a_damaged_entry_is_told_and_made_again(
    folder: Path, first: First, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = "eager" if damage == "op" else "auto"
    compilation = {"compile_cache_dir": str(tmp_path), "compiler": compiler}
    expected, _ = first.leave(tmp_path, compiler)
    for path in stored(tmp_path):
        content = json.loads(path.read_text())["content"]
        entry = {"sha256": _digest(content), "content": content}
        if damage == "no step":  # it looks whole, and would compute something else
            content["steps"] = []
        elif damage == "no content":
            del entry["content"]
        elif damage == "no piece":
            content["pieces"] = content["pieces"][:0]
            del content["steps"]
        elif damage == "no counts":
            del content["counters"]
        elif damage == "other weight":
            weight = next(b for b in content["bindings"] if b[2] is not None)
            weight[2][0] = [1, 2, 3]
        elif damage == "op":
            for piece in content["pieces"]:
                piece["constants"]["gone"] = ["implementation", "no_such_op", "cpu"]
        elif damage == "kernel":
            for piece in content["pieces"]:
                piece["plan"]["calls"][0][0] = "no_such_kernel"
        if damage != "no step":  # whoever wrote this meant it
            entry["sha256"] = _digest(content)
        text = json.dumps(entry)
        path.write_text(text[: len(text) // 2] if damage == "truncated" else text)
    with caplog.at_level(logging.WARNING):
        tokens, counts = answer(folder, tmp_path, compilation_config=compilation)
    assert tokens == expected and counts["stored_programs"] == 0 and counts["traces"] == 1
    assert "made again" in caplog.text
    assert answer(folder, tmp_path, compilation_config=compilation)[1]["stored_programs"] == 1


def test_a_body_without_its_head_keeps_its_counts(folder: Path, first: First, tmp_path: Path) -> None:
    _, made = first.leave(tmp_path)
    for path in stored(tmp_path):
        if not json.loads(path.read_text())["content"]["counters"].get("holes"):
            path.unlink()
    for _ in range(2):  # the first makes the head anew, and must not count the body's making into an entry
        _, taken = answer(folder, tmp_path)
        assert taken["stored_programs"] == 1 and taken["pieces"] == made["pieces"]
    assert len(stored(tmp_path)) == 2


def test_what_a_program_does_not_say_of_itself_is_not_stored(tmp_path: Path) -> None:
    model = random_model("llama", 2)
    store = ProgramStore(tmp_path, make_device("cpu"), {})
    opaque = Program.opaque(model, make_device("cpu"), "it looks at values")
    assert not store.save("body", opaque, model, Counters())
    assert store.load("body", model, Counters()) is None and not stored(tmp_path)
    assert opaque.run(inputs_of(model, 3)).shape[0] == 3


@pytest.mark.parametrize(
    "value",
    [
        torch.float16,
        torch.contiguous_format,
        torch.device("cpu"),
        float("inf"),
        float("-inf"),
        torch.ops.aten.view.default,
        torch.add,
        torch.Tensor.view,
        torch.ops.piecework.rms_norm.default,
        ByCall("moe", ("cpu", "reference")),
    ],
    ids=lambda value: str(value).partition(" at 0x")[0],
)
def test_constants_are_read_as_they_were(value: Any) -> None:
    spelled = spell(value)
    assert spelled is not None
    assert read(json.loads(json.dumps(spelled))) == value


def test_an_own_constant_can_not_be_spelled() -> None:
    assert spell(lambda x: x) is None
    assert spell(torch.ones(2)) is None
