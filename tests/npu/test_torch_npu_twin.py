"""The stand-in for torch_npu has the names, arguments and defaults of its releases."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
from torch_npu_sources import GRAPHS, HANDLERS, PACKAGE, USED, differences, twin_sources, wheel_sources
from torch_npu_wheel import RELEASES, NotDownloadable, Wheel, download

from piecework.ops.npu.attention import UPDATED

pytestmark = pytest.mark.slow
STREAMS, UTILS, MEMORY = (f"torch_npu/npu/{name}.py" for name in ("streams", "utils", "memory"))


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    try:
        download(request.param)
    except NotDownloadable as error:
        pytest.skip(f"torch_npu {request.param} cannot be downloaded here: {error}")
    return str(request.param)


def test_the_twin_has_the_signatures_of_the_wheel(release: str) -> None:
    assert differences(wheel_sources(download(release)), twin_sources()) == []


CHANGES = [
    (GRAPHS, "class NPUGraph(", "class AclGraph(", "no NPUGraph"),
    (GRAPHS, "def update(self, cpu_update_input)", "def update(self, inputs)", "NPUGraph.update(inputs)"),
    (GRAPHS, "auto_dispatch_capture=False,", "auto_dispatch_capture=True,", "auto_dispatch_capture=True"),
    (GRAPHS, "stream=None,\n", "on=None,\n", "graph(npu_graph, pool=None, on=None"),
    (GRAPHS, "pool=None, capture_error_mode", "mode=None, capture_error_mode", "capture_begin(mode=None"),
    (GRAPHS, "_weak_ref_tensor as", "_weak_reference as", "_weak_ref_tensor is not in torch_npu._C"),
    (GRAPHS, "graph_dispatch_records", "records", "no attribute graph_dispatch_records"),
    (GRAPHS, "def graph_pool_handle()", "def pool_handle()", "no graph_pool_handle"),
    (STREAMS, "device=None, priority=0", "device=None, priority=1", "Stream(device=None, priority=1"),
    (STREAMS, "def wait_stream(self, stream)", "def wait_stream(self, other)", "wait_stream(other)"),
    (UTILS, "def current_stream(device=None)", "def current_stream(device=0)", "current_stream(device=0)"),
    (MEMORY, "def empty_cache()", "def empty_cache(now)", "empty_cache(now)"),
    (PACKAGE, "def mem_get_info(device=None)", "def mem_get_info(index=None)", "mem_get_info(index=None)"),
    (PACKAGE, '"mem_get_info"', '"memory_info"', "mem_get_info is not exported"),
]


@pytest.mark.parametrize(("file", "old", "new", "complaint"), CHANGES, ids=[c[3][:24] for c in CHANGES])
def test_a_change_is_found(release: str, file: str, old: str, new: str, complaint: str) -> None:
    sources = wheel_sources(download(release))
    assert old in sources[file]
    found = differences({**sources, file: sources[file].replace(old, new)}, twin_sources())
    assert any(complaint in line for line in found), found


def test_attention_that_cannot_be_updated_is_found(release: str) -> None:
    sources = wheel_sources(download(release))
    changed = {
        name: text.replace("npu_fused_infer_attention_score.default", "npu_attention.default")
        if name in (GRAPHS, HANDLERS)
        else text
        for name, text in sources.items()
    }
    assert any("can't be updated" in line for line in differences(changed, twin_sources()))


def test_a_changed_twin_is_found(release: str) -> None:
    twin = twin_sources()
    changed = {**twin, UTILS: twin[UTILS].replace("def stream(stream:", "def stream(on:")}
    assert any(
        "stream(stream), not (on)" in line for line in differences(wheel_sources(download(release)), changed)
    )


def test_every_public_name_of_the_twin_is_compared() -> None:
    for file, text in twin_sources().items():
        own = {
            name.partition("(")[0].partition(":")[0]
            for line in text.splitlines()
            if line.startswith(("def ", "class "))
            for name in [line.split(" ", 1)[1]]
        }
        assert {name for name in own if name[0] != "_"} <= set(USED[file]), file


def test_memory_and_what_is_updated_are_in_the_schemas(release: str, twin: Any) -> None:
    wheel = Wheel(download(release))
    declared = {a.name: a for a in wheel.schema("empty_with_format").arguments}
    made = inspect.signature(sys.modules["torch_npu"].empty_with_format).parameters
    for parameter in made.values():
        argument = declared[parameter.name]
        assert argument.kwarg_only == (parameter.kind == parameter.KEYWORD_ONLY), parameter
        assert parameter.name == "size" or argument.default_value == parameter.default, parameter
    attention = {a.name for a in wheel.schema("npu_fused_infer_attention_score").arguments}
    assert {name for name in UPDATED.values() if name} <= attention
