"""Whole-program mode: a stub of a compiler gets decode with attention inside, one size at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from npu_tokens import SIZES, VOCABULARY, check_equal, run
from torch import Tensor, fx
from torch._dynamo.backends import registry

from piecework.compilation import CompilationConfig
from piecework.errors import ConfigError
from piecework.runner.recipe import check_splitting_ops

ATTENTION = torch.ops.piecework.paged_attention.default


@dataclass(eq=False)
class Vendor:
    """A compiler that runs the graph as it is, and keeps what it got."""

    whole: list[tuple[int, int]] = field(default_factory=list)
    """Sequences and calls of attention of each program with attention inside."""
    pieces: int = 0
    calls: int = 0

    def __call__(self, graph_module: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        attention = [node for node in graph_module.graph.nodes if node.target is ATTENTION]
        if not attention:
            self.pieces += 1
            return graph_module.forward
        assert all(isinstance(n, int) for x in inputs for n in (*x.shape, *x.stride())), "static shapes only"
        self.whole.append((attention[0].args[0].meta["val"].shape[0], len(attention)))

        def call(*tensors: Tensor) -> Any:
            assert [t.shape for t in tensors] == [x.shape for x in inputs]
            self.calls += 1
            return graph_module.forward(*tensors)

        return call


@pytest.fixture
def vendor() -> Iterator[Vendor]:
    made = Vendor()
    registry.register_backend(made, name="stub_vendor")
    yield made
    for known in (registry._BACKENDS, registry._COMPILER_FNS):
        known.pop("stub_vendor", None)


def settings(device: str, **config: Any) -> dict[str, Any]:
    chosen = {
        "compiler": "dynamo:stub_vendor",
        "splitting_ops": [],
        "decode_capture_sizes": SIZES,
        **config,
    }
    return {"device": device, "page_size": 128, "compilation_config": chosen}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "quantization"),
    [
        ("qwen3", "auto"),
        pytest.param("qwen3_moe", "auto", marks=pytest.mark.slow),
        pytest.param("qwen3", "w8a8-dynamic", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_the_eager_engine(
    kind: str,
    quantization: str,
    vendor: Vendor,
    tiny_path: Any,
    expected: Any,
    twin: Any,
    float32: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wanted = expected(kind, quantization)
    chosen = {**settings("npu"), "quantization": quantization}
    found, counters, layers = run(tiny_path(kind), chosen, VOCABULARY)
    check_equal(wanted, found)
    assert vendor.whole == [(size, layers) for size in sorted(SIZES, reverse=True)]
    assert vendor.calls == counters.whole_runs > 0 and counters.captures == 0
    assert vendor.pieces == counters.distinct + 1, "prefill's pieces and the head have no attention"
    assert "decode of 3 rows runs in pieces; there are whole programs of exactly 1, 2, 4" in caplog.text


def test_the_empty_list_is_for_vendors_compilers_alone() -> None:
    assert CompilationConfig(compiler="dynamo:anything", splitting_ops=()).whole_program
    assert not CompilationConfig(compiler="eager", splitting_ops=()).whole_program
    with pytest.raises(ConfigError, match="an empty one with compiler dynamo:<name>"):
        check_splitting_ops(())
