"""Parts of explain alone: graphs as text, what is available, break-even, sources."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from programs import program_of, random_model

from piecework.compile.base import FunctionPiece
from piecework.config import EngineConfig
from piecework.devices import make_device
from piecework.explain.available import compilers, devices
from piecework.explain.breakeven import _doubling, break_even, judge, measure
from piecework.explain.graphs import graph_lines
from piecework.explain.programs import letter
from piecework.explain.report import Choice, Report
from piecework.explain.sources import source_of
from piecework.profile import Profile
from piecework.runner.programs import Programs, make_programs
from piecework.runner.recipe import make_recipe


def test_graphs_are_written_with_shapes_in_T() -> None:
    program, _ = program_of(random_model("llama", 2))
    assert program.graph_module is not None
    lines = graph_lines(program.graph_module.graph, {"weight_0": "model.embed_tokens.weight"})
    assert lines[0] == "weight_0: float32[320, 64]  = model.embed_tokens.weight"
    assert "input_ids: int64[T]" in lines
    assert "embedding = piecework::embedding(input_ids, weight_0)  -> float32[T, 64]" in lines
    hole = next(line for line in lines if line.startswith("attention = "))
    assert hole.endswith("empty_like, 0, 0.25, 0)"), "a hole gives nothing"
    assert lines[-1].startswith("return [rms_norm")


def test_kinds_have_letters() -> None:
    assert [letter(n) for n in (0, 1, 25, 26, 53)] == ["A", "B", "Z", "A2", "B3"]


def test_devices_of_other_packages_are_listed_with_why_they_do_not_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "tpu_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tpu-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[piecework.devices]\ntpu = no_such_module:Tpu\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = {choice.name: choice for choice in devices()}
    assert found["cpu"] == Choice(
        "cpu", "piecework", "has no graphs; compilers native, eager, inductor, openvino, dynamo"
    )
    assert found["sim"].note.startswith("captures graphs")
    assert found["tpu"].origin == "tpu-plugin"
    assert found["tpu"].note == "does not load: ModuleNotFoundError: No module named 'no_such_module'"


def test_compilers_say_whether_the_device_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    device = make_device("cpu")
    found = {choice.name: choice.note for choice in compilers(device)}
    assert found[device.default_compiler()] == "the default" and found["inductor"] == ""
    assert "inductor" in found["dynamo:<backend>"]
    device.compilers = ("inductor",)
    found = {choice.name: choice.note for choice in compilers(device)}
    assert found["eager"] == "not on cpu" and found["inductor"] == "the default"
    assert found["dynamo:<backend>"].startswith("not on cpu; ")


def sim_programs(folder: Path, **compilation: object) -> Programs:
    settings = {"model": str(folder), "device": "sim", "dtype": "float32", "compilation_config": compilation}
    config = EngineConfig.from_flat(settings)
    device = make_device("sim")
    model = random_model("llama", 2)
    device.prepare_weights(model)
    recipe = make_recipe(config, device, model.config, torch.float32, 128)
    return make_programs(model, recipe, config, device, Profile(), folder, 128)


def test_break_even_says_why_there_is_nothing_to_measure(
    explained: Callable[..., Report], tmp_path: Path
) -> None:
    assert explained("llama").break_even.note == (
        "prefill runs its pieces eagerly on cpu, so nothing is replayed"
    )
    programs = sim_programs(tmp_path, decode_capture_sizes=[1], prefill_capture_sizes=[8])
    assert break_even(programs).note.startswith("not measured: graphs of sim are interpreted")


def test_break_even_is_measured_on_real_captures_and_leaves_no_trace(tmp_path: Path) -> None:
    programs = sim_programs(tmp_path, decode_capture_sizes=[1], prefill_capture_sizes=[16, 32, 48])
    assert isinstance(programs.device, type(make_device("sim")))
    graphs, counted = programs.device.graphs, programs.counters.snapshot()
    measured = measure(programs, [16, 48])
    assert [size for size, _, _ in measured] == [16, 48]
    assert all(eager > 0 and captured > 0 for _, eager, captured in measured)
    assert programs.device.graphs == graphs, "its captures are released"
    assert programs.counters.snapshot() == counted


@pytest.mark.parametrize(
    ("measured", "tokens", "note"),
    [
        (
            [(16, 2.0, 1.0), (32, 2.0, 1.9), (64, 3.0, 3.1), (128, 5.0, 4.0)],
            32,
            "faster up to 32 tokens; abo",
        ),
        ([(16, 2.0, 1.0), (32, 2.0, 1.9)], 32, "faster up to 32 tokens, the most that is captured"),
        ([(16, 1.0, 1.0)], None, "not faster at 16 tokens, the least"),
    ],
)
def test_break_even_is_the_last_size_before_the_first_loss(
    measured: list[tuple[int, float, float]], tokens: int | None, note: str
) -> None:
    found = judge(measured)
    assert found.tokens == tokens and note in found.note
    assert found.measured == tuple(measured)


def test_sizes_to_measure_double() -> None:
    assert _doubling([4, 8, 16, 20, 32, 48, 64, 80]) == [16, 32, 64, 80]
    assert _doubling([4, 8]) == [8]
    assert _doubling([]) == []


class Output:
    """Stands where inductor's output does: something to call that knows its source."""

    source_code = "the kernels"

    def __call__(self) -> tuple[()]:
        """Give nothing."""
        return ()


def test_a_source_is_found_behind_wrappers() -> None:
    output = Output()

    def wrapped() -> tuple[()]:
        return output()

    assert source_of(FunctionPiece(lambda: wrapped(), "c")) == "the kernels"
    assert source_of(FunctionPiece(lambda: wrapped(), "c", "its own")) == "its own"
    assert source_of(FunctionPiece(lambda: (), "c")) == ""


@pytest.mark.slow
def test_the_source_of_inductor_is_shown_compiled_and_cached(tmp_path: Path) -> None:
    model = random_model("llama", 2)
    for cached in (False, True):
        program, options = program_of(model, "inductor", cache_dir=tmp_path)
        assert (options.counters.cache_hits == 3) is cached
        assert all(record.cached is cached for record in program.records)
        assert all("#include" in source_of(piece) for piece in program.pieces)


def test_an_infinite_error_is_text_in_json(explained: Callable[..., Report]) -> None:
    report = explained("llama")
    entry = replace(report.body.passes[0], error=math.inf)
    body = replace(report.body, passes=(entry,))
    assert replace(report, programs=(body,)).to_dict()["programs"][0]["passes"][0]["error"] == "inf"


def test_a_model_larger_than_it_needs_memory(explained: Callable[..., Report]) -> None:
    """Parameters of 3 GB are allocated and never touched."""
    wide = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 4, "head_dim": 1024}
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        pytest.skip("peak memory is read from Linux's /proc")
    before = resident("VmRSS")
    reset.write_text("5")  # the peak counts from here
    report = explained("llama", {"compilation_config": {"verify_passes": False}}, **wide)
    assert report.body.pieces == 5
    assert resident("VmHWM") - before < 300e6


def resident(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024
