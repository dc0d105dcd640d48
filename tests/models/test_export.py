"""The graph pipeline's needs: every model is traced once, for any number of tokens, and folds."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.fx.experimental._config as symbolic_config
from tiny import NAMES, tiny_config
from torch.export import Dim, ExportedProgram

from piecework.models.build import build_model
from piecework.models.config import ModelConfig
from piecework.models.decoder import CausalLM

ATTENTION = torch.ops.piecework.attention.default
LAYERS = 5


def random_model(name: str, **overrides: Any) -> CausalLM:
    config = ModelConfig.from_dict(tiny_config(name, **overrides).to_dict())
    model = build_model(config, dtype=torch.float32, device="cpu", max_positions=64)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def export(model: CausalLM) -> ExportedProgram:
    tokens = Dim("tokens", min=1, max=64)
    with symbolic_config.patch(backed_size_oblivious=True):
        return torch.export.export(
            model,
            (torch.arange(5), torch.arange(5), torch.tensor([5])),
            dynamic_shapes={"input_ids": {0: tokens}, "positions": {0: tokens}, "num_valid_rows": None},
            strict=False,
        )


@functools.cache
def exported(name: str) -> tuple[CausalLM, ExportedProgram]:
    """The tiny model and its trace, made while something is bound: a trace must not see what is."""
    model = random_model(name)
    model.bind_attention(lambda *_: pytest.fail("the bound callable ran under export"))
    program = export(model)
    model.bind_attention(None)
    return model, program


def pieces(program: ExportedProgram) -> list[list[tuple[Any, ...]]]:
    """Cut the graph at attention; each node as its target, its literals and where its inputs come from."""
    cut: list[list[tuple[Any, ...]]] = [[]]
    inside: dict[torch.fx.Node, int] = {}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is ATTENTION:
            cut.append([])
            inside = {}
            continue
        outer: dict[torch.fx.Node, str] = {}

        def place(n: torch.fx.Node, inside: Any = inside, outer: Any = outer) -> Any:
            shape = tuple(n.meta["val"].shape[1:]) if hasattr(n.meta["val"], "shape") else ()
            return inside.get(n, outer.setdefault(n, f"outer{shape}"))

        arguments = torch.fx.map_arg((node.args, dict(node.kwargs)), place)
        inside[node] = len(inside)
        cut[-1].append((node.target, repr(arguments)))
    return cut


@pytest.mark.parametrize("name", NAMES)
def test_exported_program_is_one_graph_for_all_token_counts(name: str) -> None:
    model, program = exported(name)
    run = program.module()
    for count in (1, 2, 7, 33):
        ids = torch.randint(0, 320, (count,), generator=torch.Generator().manual_seed(count))
        arguments = (ids, torch.arange(count), torch.tensor([count]))
        torch.testing.assert_close(run(*arguments), model(*arguments), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_graph_has_one_attention_per_layer_with_its_out_allocated(name: str) -> None:
    model, program = exported(name)
    nodes = list(program.graph.nodes)
    holes = [node for node in nodes if node.target is ATTENTION]
    assert [hole.args[4] for hole in holes] == list(range(model.config.num_layers))
    for hole, spec in zip(holes, model.attention_specs, strict=True):
        out = hole.args[3]
        assert out.target is torch.ops.aten.empty_like.default
        assert nodes.index(out) < nodes.index(hole)
        assert tuple(hole.args[5:]) == (spec.scale, spec.window)
    computed = [node for node in nodes if node.op == "call_function"]
    assert not any(
        isinstance(node.meta["val"], torch.SymInt) for node in computed if node.target is not ATTENTION
    )


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_middle_pieces_are_equal(name: str) -> None:
    cut = pieces(export(random_model(name, num_hidden_layers=LAYERS)))
    assert len(cut) == LAYERS + 1
    middle = cut[1:-1]
    assert all(piece == middle[0] for piece in middle)
    assert cut[0] != middle[0] != cut[-1]


def test_pieces_of_dense_and_moe_layers_are_two_kinds() -> None:
    cut = pieces(export(random_model("qwen3_moe", num_hidden_layers=LAYERS, mlp_only_layers=[1, 2])))
    moe = torch.ops.piecework.moe.default
    kinds = [any(node[0] is moe for node in piece) for piece in cut]
    assert kinds == [False, True, False, False, True, True]
    assert cut[1] == cut[4] and cut[2] == cut[3] and cut[1] != cut[2]


@pytest.mark.parametrize("name", NAMES)
def test_every_norm_but_the_first_reads_the_sum_before_it(name: str) -> None:
    # The fusion of add and rms_norm looks for exactly this.
    graph = exported(name)[1].graph
    hidden = [
        node
        for node in graph.nodes
        if node.target is torch.ops.piecework.rms_norm.default and node.meta["val"].ndim == 2
    ]
    sources = [node.args[0].target for node in hidden]
    assert sources[0] is torch.ops.piecework.embedding.default
    assert all(source is torch.ops.aten.add.Tensor for source in sources[1:])
    assert len(sources) == 2 * tiny_config(name).num_hidden_layers + 1
