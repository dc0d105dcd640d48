"""The manager: standalone use, order, conditions, reports, expectations."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from pass_graphs import (
    OPS,
    add_rms_norm,
    count,
    function_graph,
    model_graph,
    qkv_norm_rope,
    random_model,
    warnings_of,
)
from torch import Tensor
from torch.fx import Graph, GraphModule, symbolic_trace

from piecework.errors import ConfigError
from piecework.graph.passes import (
    GraphPass,
    Outcome,
    PassContext,
    PassError,
    PassManager,
    PatternPass,
    available,
    make_manager,
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


@pytest.mark.parametrize(("expect", "met"), [("each_layer", True), (6, True), (5, False), (None, True)])
def test_expectations(expect: Any, met: bool, caplog: pytest.LogCaptureFixture) -> None:
    module = model_graph(random_model("llama"))
    pm = PassManager(module)
    pm.add(add_rms_norm, eps=1e-5, expect=expect)
    pm.apply()
    assert warnings_of(caplog) == ([] if met else ["pass add_rms_norm: 6 matches, expected 5"])


def test_a_layer_that_does_not_match_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    model = random_model("llama")
    model.model.layers[1].post_attention_layernorm.eps = 1e-6
    pm = PassManager(model_graph(model))
    pm.add(add_rms_norm, eps=1e-5)
    assert pm.apply()["add_rms_norm"].matches == 5
    assert warnings_of(caplog) == ["pass add_rms_norm: 5 matches, expected a multiple of 3 layers"]


def test_a_miss_is_one_warning_that_says_what_was_in_the_way(caplog: pytest.LogCaptureFixture) -> None:
    pm = PassManager(layers=1)
    pm.add(
        PatternPass(
            name="never",
            pattern=lambda x, w, eps: OPS.rms_norm(x, w, eps),
            replacement=lambda x, w, eps: OPS.rms_norm(x, w, eps) * 1,
            where=lambda match: False,
            expect="each_layer",
        )
    )
    for _ in range(3):
        pm.apply(small_graph())
    assert warnings_of(caplog) == [
        "pass never: 0 matches, expected a multiple of 1 layers; 1 times not: its condition does not hold"
    ]


def test_a_miss_is_an_error_in_strict_mode() -> None:
    pm = PassManager(model_graph(random_model("llama")), strict=True)
    pm.add(add_rms_norm, eps=1e-6)
    with pytest.raises(PassError, match=r"^pass add_rms_norm: 0 matches, expected a multiple of 3 layers"):
        pm.apply()


def test_expectations_are_not_held_against_a_part_of_a_model(caplog: pytest.LogCaptureFixture) -> None:
    pm = PassManager(strict=True)
    pm.add(nothing("a", expect=3))
    pm.add(nothing("b", expect="each_layer"))
    pm.apply(small_graph(), expectations=False)
    assert warnings_of(caplog) == []
    only_layers = PassManager(small_graph(), strict=True)
    only_layers.add(nothing("b", expect="each_layer"))
    only_layers.apply()  # a graph without layers


def breaks(graph: Graph, context: PassContext) -> int:
    raise RuntimeError("no luck")


def drops_an_output(graph: Graph, context: PassContext) -> int:
    (output,) = graph.find_nodes(op="output")
    (last,) = output.args[0] if isinstance(output.args[0], tuple | list) else output.args
    output.args = ((last, last),)
    return 1


def changes_shape(graph: Graph, context: PassContext) -> int:
    (output,) = graph.find_nodes(op="output")
    (last,) = output.all_input_nodes
    with graph.inserting_before(output):
        output.replace_input_with(last, graph.call_function(torch.ops.aten.sum.dim_IntList, (last, [1])))
    return 1


def adds_an_input(graph: Graph, context: PassContext) -> int:
    with graph.inserting_before(next(iter(graph.nodes))):
        graph.placeholder("more").meta["val"] = next(iter(graph.nodes)).meta["val"]
    return 1


def uses_wrong_arguments(graph: Graph, context: PassContext) -> int:
    (norm,) = graph.find_nodes(op="call_function", target=OPS.rms_norm.default)
    norm.args = (norm.args[0], norm.args[1])
    return 1


@pytest.mark.parametrize(
    ("rewrite", "reason"),
    [
        (breaks, "RuntimeError: no luck"),
        (drops_an_output, "the graph had 1 outputs and has 2"),
        (changes_shape, "output 0 was"),
        (adds_an_input, "inputs changed"),
        (uses_wrong_arguments, "missing"),
    ],
)
def test_a_pass_that_breaks_the_graph_is_undone(
    rewrite: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = small_graph()
    before = [n.format_node() for n in module.graph.nodes]
    x, weight = torch.randn(3, 8), torch.randn(8)
    expected = module(x, weight)
    pm = PassManager(module)
    pm.add(GraphPass(name="broken", rewrite=rewrite))
    entry = pm.apply()["broken"]
    assert entry.status == "failed" and reason in entry.reason
    assert [n.format_node() for n in module.graph.nodes] == before
    torch.testing.assert_close(module(x, weight), expected)
    (warning,) = warnings_of(caplog)
    assert warning.startswith("pass broken: ")
    strict = PassManager(small_graph(), strict=True)
    strict.add(GraphPass(name="broken", rewrite=rewrite))
    with pytest.raises(PassError, match=r"^pass broken: "):
        strict.apply()


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


def test_managers_are_made_by_name() -> None:
    names = [p.name for p in make_manager().passes]
    assert names[-2:] == ["common_subexpressions", "dead_code"]
    assert not [n for n in names if n.startswith("raise_")]
    assert make_manager(foreign=True).passes[0].name == "raise_rms_norm"
    chosen = make_manager(["dead_code", "raise_linear"], ["dead_code"])
    assert [p.name for p in chosen.passes] == ["dead_code", "raise_linear"]
    assert chosen.apply(small_graph())["dead_code"].status == "disabled"
    assert {a.origin for a in available().values() if a.name.startswith("raise_")} == {"piecework"}


@pytest.mark.parametrize(
    ("passes", "disable", "field"), [(["x"], [], "passes"), (None, ["x"], "disable_passes")]
)
def test_an_unknown_name_is_refused_with_the_known_ones(passes: Any, disable: Any, field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}='x' is not allowed: names of raise_rms_norm, "):
        make_manager(passes, disable)


def test_canonicalise_can_be_left_out() -> None:
    pm = make_manager(disable=["canonicalise"])
    module = function_graph(lambda x: x.reshape(-1, 4) * 2, ("T", 8))
    assert pm.apply(module)["canonicalise"].status == "disabled"
    assert count(module, "aten::reshape") == 1


def test_results_of_functions_are_the_same_after_all_default_passes() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        a = OPS.rms_norm(x, w, 1e-5)
        b = OPS.rms_norm(x, w, 1e-5)
        (x * 3).sum()
        return a + b.reshape(-1, 8), b

    module = function_graph(fn, ("T", 8), (8,))
    report = make_manager(verify=True, strict=True).apply(module)
    assert (report["common_subexpressions"].matches, count(module, "piecework::rms_norm")) == (1, 1)
    x, w = torch.randn(5, 8), torch.randn(8)
    torch.testing.assert_close(module(x, w), fn(x, w), rtol=0, atol=0)
