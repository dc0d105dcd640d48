"""docs/compat.md is right: each row parses to what it says, and no flag of the tables in code is missing."""

from __future__ import annotations

import re
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from piecework.cli.compilation_aliases import ALIASES
from piecework.cli.flags import COMPILATION, given_settings
from piecework.cli.parser import UserError
from piecework.cli.serve import make_parser
from piecework.compilation import OTHER_ATTENTION, CompilationConfig
from piecework.config import EngineConfig, ServerConfig, leaves

PAGE = (Path(__file__).parents[2] / "docs" / "compat.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(-[^`]+)` \| (\S.*?) \| (.*?) \| .*\|$", PAGE, re.MULTILINE)
OWN = {"--model-dir", "--max-seq-len", "--token-budget", "--worker-start-timeout", "--worker-step-timeout"}


def parsed(command: str) -> dict[str, Any]:
    """What a command line gives: leaves of both trees, and of compilation_config what isn't the default."""
    args = make_parser().parse(shlex.split(command))
    found = {**given_settings(EngineConfig, args), **given_settings(ServerConfig, args)}
    if COMPILATION in found:
        settings, plain = asdict(CompilationConfig.parse(found.pop(COMPILATION))), asdict(CompilationConfig())
        found |= {name: value for name, value in settings.items() if value != plain[name]}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


@pytest.mark.parametrize(("command", "engine", "sets"), ROWS, ids=[row[0] for row in ROWS])
def test_a_row_parses_to_what_it_says(command: str, engine: str, sets: str) -> None:
    assert engine in ("both", "vLLM") or engine.startswith("SGLang")
    if command == "--config f":
        assert make_parser().parse(shlex.split(command)).config == "f"
        return
    said = dict(item.split("=", 1) for item in re.findall(r"`([^`]+)`", sets))
    expected = {name: yaml.safe_load(value) for name, value in said.items()}
    found = parsed(command)
    for name in ("kv_cache_memory",):  # the text of a size is read with the tree
        if name in expected:
            expected[name] = int(expected[name].removesuffix("M")) * 2**20
    assert found == expected


def test_every_flag_of_another_engine_has_its_row() -> None:
    listed = [shlex.split(command)[0] for command, _, _ in ROWS]
    renamed = {
        flag
        for tree in (EngineConfig, ServerConfig)
        for leaf, _ in leaves(tree).values()
        for flag in leaf.metadata["flags"]
    }
    assert renamed - OWN <= set(listed)
    assert len(ALIASES) >= 18
    for alias in ALIASES:
        assert alias.flag in listed
        (engine,) = (engine for command, engine, _ in ROWS if shlex.split(command)[0] == alias.flag)
        assert engine.startswith(alias.engine)


def test_every_attention_of_another_engine_is_on_the_page() -> None:
    assert [name for name in OTHER_ATTENTION if f"`{name}`" not in PAGE] == []


@pytest.mark.parametrize("words", ["1 2 4", "1,2,4", "[1,2,4]", "'[1, 2, 4]'", "1,2 4"])
def test_sizes_are_read_as_each_engine_writes_them(words: str) -> None:
    assert parsed(f"--cuda-graph-bs {words}") == {"decode_capture_sizes": [1, 2, 4]}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "--disable-cuda-graph --enable-piecewise-cuda-graph",
            "prefill_graph is given twice: 'eager' by --disable-cuda-graph and 'piecewise' by "
            "--enable-piecewise-cuda-graph",
        ),
        (
            "--enable-torch-compile --compiler eager",
            "compiler is given twice: 'eager' by --compiler and 'inductor' by --enable-torch-compile",
        ),
        ("--cuda-graph-bs 1 x", "argument --cuda-graph-bs: 'x' is not a list of sizes such as 1,2,4"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(command: str, message: str) -> None:
    with pytest.raises(UserError, match="^" + re.escape(message)):
        parsed(command)


def test_sizes_that_are_given_twice_may_stand_in_any_order() -> None:
    assert parsed("--cuda-graph-bs 2 1 --capture-sizes 1,2") == {"decode_capture_sizes": [1, 2]}


def test_the_weaker_flag_gives_way_in_any_order() -> None:
    for command in (
        "--torch-compile-max-bs 8 --cuda-graph-max-bs 4",
        "--cuda-graph-max-bs 4 --torch-compile-max-bs 8",
    ):
        assert parsed(command) == {"max_decode_capture_size": 4}
    sizes = "--torch-compile-max-bs 8 --cuda-graph-bs 1 16"
    assert parsed(sizes) == {"decode_capture_sizes": [1, 16]}
    assert parsed("--decode-graph eager --disable-cuda-graph") == parsed("--disable-cuda-graph")
