"""What explain says of tiny models is what their programs are."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from piecework.config import EngineConfig
from piecework.devices import make_device
from piecework.engine.service import Service
from piecework.explain.page import report_page
from piecework.explain.programs import describe_program
from piecework.explain.report import Report
from piecework.explain.text import order_of, report_text
from piecework.graph.program import Program
from piecework.native import library

Command = Callable[..., str]
Explained = Callable[..., Report]
SIM = {"device": "sim", "max_model_len": 32, "max_num_seqs": 8, "max_num_batched_tokens": 32}


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("layers", [2, 8])
def test_counts_of_a_plain_decoder(explained: Explained, name: str, layers: int) -> None:
    found = explained(name, num_hidden_layers=layers).to_dict()
    counts = [found[key] for key in ("graphs_traced", "pieces", "holes", "distinct_pieces")]
    assert counts == [1, layers + 1, layers, 3]
    assert found["layers"] == layers


def test_a_mix_of_layers_has_a_kind_for_each(explained: Explained) -> None:
    body = explained("qwen3_moe").body
    assert order_of(body) == "A, B, C, B, D"
    assert [kind.uses for kind in body.kinds] == [(0,), (1, 3), (2,), (4,)]
    assert [kind.ops.get("piecework::moe", 0) for kind in body.kinds] == [0, 1, 0, 1]
    assert [step.layer for step in body.steps if step.hole] == [0, 1, 2, 3]
    calls = sum(sum(kind.ops.values()) * len(kind.uses) for kind in body.kinds)
    assert calls + body.holes == sum(body.ops.values())


def test_nothing_is_read_but_the_configuration(configured: Callable[..., Path], command: Command) -> None:
    folder = configured("llama")
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    found = json.loads(command(str(folder), "--json"))
    assert found["pieces"] == 4
    said = command(str(folder), "--load-format", "dummy")
    assert "4 pieces, 3 holes (piecework::attention), 3 distinct pieces: A, 2 x B, C" in said


def test_it_is_what_the_engine_runs(configured: Callable[..., Path], explained: Explained) -> None:
    report = explained("llama", SIM)
    settings = {**SIM, "model": report.model, "dtype": "float32", "load_format": "dummy"}
    service = Service(EngineConfig.from_flat(settings))
    service.close()
    counted = service.graph_counters()["body"]
    for name in ("pieces", "holes"):
        assert counted[name] == getattr(report.body, name)
    assert counted["distinct"] == report.body.distinct_pieces
    assert counted["captures"] == report.capture.graphs


def test_captures_and_what_was_dropped(explained: Explained) -> None:
    sizes = {"decode_graph": "piecewise", "decode_capture_sizes": [1, 8], "prefill_capture_sizes": [8, 16]}
    capture = explained("llama", {**SIM, "compilation_config": sizes}, num_hidden_layers=2).capture
    assert (capture.decode, capture.prefill) == ("piecewise", "piecewise")
    assert capture.sizes == {"piecewise": (1, 8, 16), "head": (1, 8)}
    assert capture.graphs == 3 * 3 + 2
    assert capture.graph_budget == 1800 and capture.dropped == ()
    assert capture.bytes is not None and capture.pool_bytes is not None and capture.graph_bytes is not None
    assert capture.bytes == capture.pool_bytes + capture.graphs * capture.graph_bytes > 0


def test_a_plan_that_does_not_fit_says_why(explained: Explained) -> None:
    sizes = {"prefill_capture_sizes": list(range(1, 251)), "decode_graph": "eager"}
    settings = {"device": "sim", "compilation_config": sizes}
    report = explained("llama", settings, num_hidden_layers=9)
    assert report.capture.graphs <= 1800
    assert len(report.capture.sizes["piecewise"]) == 180
    ((name, dropped, reason),) = report.capture.dropped
    assert (name, len(dropped), reason) == ("piecewise", 70, "the device has room for 1800 graphs")
    assert f"not piecewise {list(dropped)}: {reason}" in report_text(report)


def test_every_rewrite_is_verified_by_default(command: Command, configured: Callable[..., Path]) -> None:
    folder = str(configured("qwen3"))
    found = json.loads(command(folder, "--json"))
    entries = found["programs"][0]["passes"]
    fusions = ["split_qkv_rmsnorm_rope", "add_rms_norm"]
    assert [e["name"] for e in entries] == ["canonicalise", "common_subexpressions", *fusions, "dead_code"]
    assert [e["matches"] for e in entries[2:4]] == [3, 6]
    assert all(0 <= e["error"] <= 1e-5 for e in entries)
    assert entries[0]["matches"] == 3 and entries[0]["rewrites"]
    found = json.loads(command(folder, "--json", "--no-verify-passes"))
    assert {e["error"] for e in found["programs"][0]["passes"]} == {None}


def test_passes_of_another_package(command: Command, configured: Callable[..., Path], acme: str) -> None:
    folder = str(configured("llama"))
    found = json.loads(command(folder, "--json", "--disable-passes", "double_negation,add_rms_norm"))
    listed = {c["name"]: (c["origin"], c["note"]) for c in found["passes"]}
    assert listed["swap_add"] == (acme, "runs")
    assert listed["double_negation"] == (acme, "disabled")
    assert listed["dead_code"] == ("piecework", "runs")
    assert listed["raise_linear"][1].startswith("not run")
    entries = {e["name"]: e for e in found["programs"][0]["passes"]}
    assert (entries["swap_add"]["status"], entries["swap_add"]["matches"]) == ("applied", 6)
    assert entries["double_negation"]["status"] == "disabled"
    assert entries["drop_add"]["status"] == "refused" and entries["drop_add"]["error"] > 0.1
    assert found["programs"][0]["ops"]["aten::add"] == 6, "the wrong pass was undone"
    before, after = entries["swap_add"]["rewrites"][0]
    assert [line.replace("_coded", "") for line in before] == ["add = aten::add(embedding, linear_1)"]
    assert len(after) == 1 and after[0].replace("_coded", "").endswith("aten::add(linear_1, embedding)")
    assert listed["drop_add"] == (acme, "refused by verification")
    found = json.loads(command(folder, "--json", "--no-verify-passes", "--passes", "dead_code"))
    notes = {c["name"]: c["note"] for c in found["passes"]}
    assert notes["swap_add"] == notes["add_rms_norm"] == "not run: not among the passes that were chosen"
    assert notes["dead_code"] == "runs" and notes["canonicalise"] == "runs, before all others"


def test_a_model_that_could_not_be_traced(explained: Explained) -> None:
    opaque = Program.opaque(torch.nn.Identity(), make_device("cpu"), "it depends on values")
    body = describe_program("body", opaque)
    assert (body.pieces, body.holes, body.distinct_pieces, body.graphs_traced) == (0, 1, 0, 0)
    report = replace(explained("llama"), programs=(body,))
    assert "runs eagerly, as one hole: it depends on values" in report_text(report)
    assert json.loads(json.dumps(report.to_dict()))["programs"][0]["opaque_reason"] == "it depends on values"
    assert "not traced" in report_page(report)


def test_the_text_has_every_part(explained: Explained) -> None:
    text = " ".join(report_text(explained("llama", SIM)).split())
    for part in (
        "LlamaForCausalLM of 3 layers, float32 on sim, compiler eager, up to 32 tokens",
        "trace ",
        "piecework::add_rms_norm 0 6",
        "add_rms_norm applied 6 47 -> 41",
        "canonicalise applied 3 53 -> 53",
        "B 2 12 eager",
        "decode full (of full, piecewise, eager), prefill piecewise (of piecewise, eager)",
        "full: [1, 2, 4, 8]",
        "not measured: graphs of sim are interpreted",
        "captures graphs; compilers eager, inductor, dynamo",
        "dynamo:<backend>",
    ):
        assert part in text, part


def test_a_compiler_that_fails_is_told(explained: Explained) -> None:
    report = explained("llama", {"compilation_config": {"compiler": "dynamo:failing_for_explain"}})
    assert [kind.compiler for kind in report.body.kinds] == ["eager"] * 3
    assert all("no such luck" in (kind.failure or "") for kind in report.body.kinds)
    assert "no such luck" in report_text(report)


@pytest.fixture(autouse=True, scope="module")
def failing_backend() -> None:
    from torch._dynamo import register_backend
    from torch._dynamo.backends.registry import list_backends

    def failing_for_explain(graph_module: Any, inputs: Any) -> Any:
        raise RuntimeError("no such luck")

    if "failing_for_explain" not in list_backends():
        register_backend(failing_for_explain)


@pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("llama", {}, r"run as one call, of \d\d kernels"),
        ("llama", {"compilation_config": {"chain": False}}, r"run piece by piece \(chain is false\)"),
        ("qwen3_moe", {}, r"run piece by piece \(a piece is run by the compiler eager\)"),
        ("llama", SIM, r"run piece by piece \(the device sim launches each piece\)"),
    ],
    ids=["native", "switched off", "experts", "sim"],
)
def test_it_says_how_steps_outside_graphs_run(
    explained: Explained, name: str, settings: dict[str, Any], said: str
) -> None:
    report = explained(name, settings)
    assert re.search(rf"^  steps outside graphs {said}$", report_text(report), re.MULTILINE)
    assert re.search(rf"Steps outside graphs {said}\.", report_page(report))
