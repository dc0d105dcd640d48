"""The manager: standalone use, order, conditions, reports, expectations."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from pass_graphs import (
    OPS,
    add_rms_norm,
    function_graph,
    model_graph,
    qkv_norm_rope,
    random_model,
)
from torch.fx import Graph, GraphModule, symbolic_trace

from piecework.graph.passes import (
    GraphPass,
    Outcome,
    PassContext,
    PassError,
    PassManager,
    tolerance,
)


def nothing(name: str, **settings: Any) -> GraphPass:
    return GraphPass(name=name, rewrite=lambda graph, context: 0, **settings)


def small_graph() -> GraphModule:
    return function_graph(lambda x, w: OPS.rms_norm(x, w, 1e-5) * 2, ("T", 8), (8,))


def test_standalone_use() -> None:
    module = model_graph(random_model("llama"))
    pm = PassManager(module)
    pm.add(add_rms_norm, eps=1e-5)
    report = pm.apply()
    assert report.matches == {"canonicalise": 3, "add_rms_norm": 6}
    entry = report["add_rms_norm"]
    assert entry.ops_before["aten::add"] == 6 and "aten::add" not in entry.ops_after
    assert entry.ops_after["passtest::add_rms_norm"] == 6
    assert 0 < entry.ms < 60_000 and entry.error is None and report.ms >= entry.ms
    assert len(entry.rewrites) == 6
    assert entry.rewrites[0].before[0].endswith("= aten::add(embedding, linear_1)")
    assert "passtest::add_rms_norm(" in entry.rewrites[0].after[0]


def test_the_report_reads_as_a_table_and_as_json() -> None:
    pm = PassManager(model_graph(random_model("llama")), verify=True)
    pm.add(add_rms_norm, eps=1e-5)
    pm.add(nothing("off", bound=tolerance()))
    pm.disable("off")
    report = pm.apply()
    lines = report.table().splitlines()
    assert lines[0].split() == ["pass", "status", "matches", "ops", "ms", "bound", "error"]
    assert lines[2].split()[:6] == ["add_rms_norm", "applied", "6", "53", "->", "47"]
    assert lines[2].split()[-2:] == ["bitwise", "0"]
    assert lines[4].strip() == "disabled by name"
    plain = json.loads(json.dumps(report.to_dict()))
    assert [p["status"] for p in plain] == ["applied", "applied", "disabled"]
    with pytest.raises(KeyError, match="no pass 'x'; there are canonicalise, add_rms_norm, off"):
        report["x"]


def test_passes_run_in_the_order_in_which_they_were_added() -> None:
    seen: list[str] = []

    def note(name: str) -> GraphPass:
        def rewrite(graph: Graph, context: PassContext) -> int:
            seen.append(name)
            return 0

        return GraphPass(name=name, rewrite=rewrite)

    pm = PassManager(small_graph())
    for name in ("b", "c", "a"):
        pm.add(note, name=name)
    pm.disable("c")
    report = pm.apply()
    assert seen == ["b", "a"]
    assert [(p.name, p.status) for p in report.passes] == [
        ("canonicalise", "no match"),
        ("b", "no match"),
        ("c", "disabled"),
        ("a", "no match"),
    ]
    assert [p.name for p in pm.passes] == ["b", "c", "a"]


def test_a_pass_can_be_limited_to_devices_and_dtypes() -> None:
    pm = PassManager(small_graph(), device="cpu")
    pm.add(nothing("npu_only", devices=("npu", "cuda"), expect=1))
    pm.add(nothing("half_only", dtypes=(torch.float16,)))
    pm.add(nothing("here", devices=("cpu",), dtypes=(torch.float32,)))
    report = pm.apply()
    assert [p.status for p in report.passes[1:]] == ["skipped", "skipped", "no match"]
    assert report["npu_only"].reason == "not for device cpu (for npu, cuda)"
    assert report["half_only"].reason == "not for torch.float32 (for torch.float16)"
    half = PassManager(small_graph(), device="npu", dtype=torch.float16)
    half.add(nothing("half_only", dtypes=(torch.float16,), devices=("npu",)))
    assert half.apply()["half_only"].status == "no match"


def test_the_dtype_is_that_of_the_weights() -> None:
    seen: list[PassContext] = []

    def look(graph: Graph, context: PassContext) -> int:
        seen.append(context)
        return 0

    pm = PassManager(model_graph(random_model("qwen3", dtype=torch.bfloat16)), parameters={"eps": 1e-5})
    pm.add(GraphPass(name="look", rewrite=look))
    pm.apply()
    (context,) = seen
    # The rotary table is float32, all else is bfloat16.
    assert (context.dtype, context.layers, context.device) == (torch.bfloat16, 3, "cpu")
    assert context.parameters == {"eps": 1e-5}


def test_fake_values_are_true_after_every_pass() -> None:
    def narrower(graph: Graph, context: PassContext) -> int:
        (norm,) = graph.find_nodes(op="call_function", target=OPS.rms_norm.default)
        with graph.inserting_after(norm):
            cast = graph.call_function(torch.ops.aten.to.dtype, (norm, torch.float64))
            norm.replace_all_uses_with(cast)
            cast.args = (norm, torch.float64)
            # A pass that copies meta along must not be believed.
            cast.meta = dict(norm.meta)
        with graph.inserting_before(next(n for n in graph.nodes if n.op == "output")):
            (output,) = graph.find_nodes(op="output")
            (last,) = output.all_input_nodes
            back = graph.call_function(torch.ops.aten.to.dtype, (last, torch.float32))
            output.replace_input_with(last, back)
        return 1

    module = small_graph()
    pm = PassManager(module, strict=True)
    pm.add(GraphPass(name="narrower", rewrite=narrower, bound=tolerance()))
    pm.apply()
    dtypes = [n.meta["val"].dtype for n in module.graph.nodes if n.op == "call_function"]
    assert dtypes == [torch.float32, torch.float64, torch.float64, torch.float32]


def test_a_graph_without_fake_values_needs_example_inputs() -> None:
    def bare() -> GraphModule:
        graph = Graph()
        x, w = graph.placeholder("x"), graph.placeholder("w")
        y = graph.call_function(torch.ops.aten.add.Tensor, (x, x))
        graph.output(graph.call_function(OPS.rms_norm.default, (y, w, 1e-5)))
        return GraphModule(torch.nn.Module(), graph)

    with pytest.raises(PassError, match="placeholder x has no fake value; give example_inputs"):
        PassManager(bare()).apply()
    module = bare()
    pm = PassManager(module, example_inputs=[torch.ones(2, 8), torch.ones(8)], verify=True)
    pm.add(add_rms_norm, eps=1e-5, expect=None)
    # The sum isn't returned here, so it is an output that nobody uses.
    assert pm.apply()["add_rms_norm"].matches == 1


def test_a_graph_that_is_not_of_ops_is_refused() -> None:
    module = symbolic_trace(lambda x: x.view(-1) + 1)
    with pytest.raises(PassError, match=r"call_method view is no op; trace the model"):
        PassManager(module, example_inputs=[torch.ones(2)]).apply()
    with pytest.raises(ValueError, match="graph_module=None"):
        PassManager().apply()


def scale_by(factor: float, eps: float = 1e-5) -> GraphPass:
    return nothing("scale_by", version=int(factor))


def no_pass() -> Any:
    return {}


def test_parameters_come_from_the_call_or_the_manager() -> None:
    pm = PassManager(parameters={"factor": 3.0, "unrelated": 1})
    assert pm.add(scale_by).version == 3
    assert PassManager(parameters={"factor": 3.0}).add(scale_by, factor=4.0).version == 4
    with pytest.raises(PassError, match="pass scale_by: missing a required argument: 'factor'; it has fac"):
        PassManager().add(scale_by)
    with pytest.raises(PassError, match="pass scale_by: got an unexpected keyword argument 'other'"):
        PassManager().add(scale_by, factor=1.0, other=2)
    with pytest.raises(PassError, match="pass scale_by: is in the list already"):
        pm.add(scale_by, factor=1.0)
    with pytest.raises(PassError, match="pass a: is made already and takes no eps"):
        pm.add(nothing("a"), eps=1)
    with pytest.raises(PassError, match="pass no_pass: gave dict, which is no Pass"):
        pm.add(no_pass)


def test_the_key_changes_with_what_matters() -> None:
    def key(disable: str = "", **params: Any) -> str:
        pm = PassManager()
        pm.add(add_rms_norm, **params)
        if disable:
            pm.disable(disable)
        return pm.key()

    keys = {key(eps=1e-5), key(eps=1e-6), key("add_rms_norm", eps=1e-5)}
    assert len(keys) == 3 and key(eps=1e-5) == key(eps=1e-5)


def test_graph_passes_may_say_what_they_refused() -> None:
    def rewrite(graph: Graph, context: PassContext) -> Outcome:
        outcome = Outcome()
        outcome.refused["too small"] += 2
        return outcome

    pm = PassManager(small_graph())
    pm.add(GraphPass(name="picky", rewrite=rewrite))
    report = pm.apply()
    assert report["picky"].refused == {"too small": 2}
    assert "2 times not: too small" in report.table()


def test_the_passes_that_may_change_bits_are_listed() -> None:
    pm = PassManager(model_graph(random_model("qwen3")))
    pm.add(add_rms_norm, eps=1e-5, bound=tolerance())
    pm.add(qkv_norm_rope)
    assert pm.apply().not_bitwise == ["add_rms_norm"]
