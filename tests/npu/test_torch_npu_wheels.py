"""What is used of torch_npu is in its releases: every name, argument and default."""

from __future__ import annotations

import inspect
from dataclasses import replace

import fake_torch_npu
import pytest
from torch_npu_wheel import RELEASES, NotDownloadable, Wheel, complaints, download

from piecework.ops.npu.vendor import FUNCTIONS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=RELEASES)
def wheel(request: pytest.FixtureRequest) -> Wheel:
    try:
        return Wheel(download(request.param))
    except NotDownloadable as error:
        pytest.skip(f"torch_npu {request.param} cannot be downloaded here: {error}")


def test_every_function_is_used_as_it_is_declared(wheel: Wheel) -> None:
    assert wheel.exported
    assert complaints(wheel, FUNCTIONS) == []


class Changed(Wheel):
    """A release in which one function has another schema."""

    def __init__(self, wheel: Wheel, function: str, old: str, new: str) -> None:
        assert old in wheel.text[function]
        text = wheel.text[function].replace(old, new)
        others = {name: other for name, other in wheel.text.items() if name != function}
        self.text = {**others, text.split("(")[0]: text}


@pytest.mark.parametrize(
    ("function", "old", "new", "complaint"),
    [
        ("npu_add_rms_norm", "npu_add_rms_norm", "npu_add_norm", "no such function"),
        ("npu_add_rms_norm", "epsilon", "eps", "no argument epsilon"),
        ("npu_add_rms_norm", "x2", "residual", "positional arguments are ['x1', 'residual'"),
        (
            "npu_add_rms_norm",
            "Tensor x1, Tensor x2",
            "Tensor x2, Tensor x1",
            "positional arguments are ['x2'",
        ),
        ("npu_add_rms_norm", "Tensor gamma", "Tensor gamma, Tensor beta", "beta has no default"),
        ("npu_add_rms_norm", "-> (Tensor, ", "-> (", "2 results, not 3"),
        (
            "npu_add_rms_norm_quant",
            "div_mode=True",
            "div_mode=False",
            "the default of div_mode is False, not True",
        ),
        ("npu_add_rms_norm_quant", "div_mode", "mode", "no argument div_mode"),
        ("npu_quant_matmul", "pertoken_scale=", "token_scale=", "no argument pertoken_scale"),
        ("npu_swiglu", "int dim", "*, int dim", "positional arguments are ['self']"),
    ],
)
def test_a_change_is_found(wheel: Wheel, function: str, old: str, new: str, complaint: str) -> None:
    found = complaints(Changed(wheel, function, old, new), FUNCTIONS)
    assert found and all(line.startswith(f"{function}: ") for line in found)
    assert any(complaint in line for line in found)


def test_a_changed_table_is_found(wheel: Wheel) -> None:
    norm = FUNCTIONS["npu_add_rms_norm"]
    table = {**FUNCTIONS, "npu_add_rms_norm": replace(norm, keywords=("eps",))}
    assert complaints(wheel, table) == ["npu_add_rms_norm: no argument eps"]


def test_the_fake_has_the_signatures_of_the_wheel(wheel: Wheel) -> None:
    """Every parameter of the fake is one of the release, in its place, with its default."""
    assert {name for name in vars(fake_torch_npu) if name.startswith("npu_")} == set(FUNCTIONS)
    for name in FUNCTIONS:
        declared = {argument.name: argument for argument in wheel.schema(name).arguments}
        order = [argument.name for argument in declared.values() if not argument.kwarg_only]
        parameters = inspect.signature(getattr(fake_torch_npu, name)).parameters
        placed = [p.name for p in parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
        assert order[: len(placed)] == placed, name
        for parameter in parameters.values():
            argument = declared[parameter.name]
            assert argument.kwarg_only == (parameter.kind == parameter.KEYWORD_ONLY), parameter
            required = parameter.default is parameter.empty
            assert required != argument.has_default_value(), f"{name}: {parameter}"
            assert required or argument.default_value == parameter.default, f"{name}: {parameter}"
