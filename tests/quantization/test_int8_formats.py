"""Quantised checkpoints in both styles load, and compute what their numbers say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from shutil import copytree

import pytest
import torch
from int8_checkpoints import KINDS, args, change, config_of, edit, loaded, logits, write
from reference import nrmse
from safetensors.torch import load_file
from tiny import tiny_model

from piecework.errors import ConfigError, ModelError
from piecework.layers.int8 import W8A8Linear, W8Linear
from piecework.quantization.compressed_tensors import pack, unpack

# Against the model that the checkpoint stands for: the same sums in another order, which now and then
# round an input to the neighbouring step. Such a step is 1/127 of one of 64 channels' largest value.
EXACT = 2e-3
# Against the float model: rounding moves a weight by up to 1/254 of its row's largest and an input by as
# much of its token's (tensor's), at random; over 64 channels and 6 products in a row that is about 1-2% of
# the logits' range, and a wrong scale or a lost offset is far more.
QUANTISED = 4e-2

Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A static checkpoint of one layer in both styles, to copy and to spoil."""
    root = tmp_path_factory.mktemp("written")
    return {
        s: write(root / s, "llama", "static", s, num_hidden_layers=1)[0] for s in ("compressed", "modelslim")
    }


@pytest.mark.parametrize("style", ["compressed", "modelslim"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["qwen2", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_checkpoint_computes_what_its_numbers_say(tmp_path: Path, name: str, kind: str, style: str) -> None:
    folder, stands_for = write(tmp_path / "m", name, kind, style)
    model = loaded(folder)
    expected = logits(stands_for)
    assert nrmse(logits(model), expected) < EXACT
    assert nrmse(logits(model), logits(tiny_model(name))) < QUANTISED
    layer = model.model.layers[1].self_attn.qkv_proj
    assert type(layer) is (W8Linear if kind == "w8" else W8A8Linear)
    assert layer.weight.dtype == torch.int8 and layer.sizes == (64, 32, 32)
    if kind != "w8":
        assert layer.is_static == (kind != "dynamic")
        # Only an offset, or ModelSlim's folded bias, makes an integer bias.
        assert (layer.quant_bias is not None) == (
            kind == "asymmetric" or (kind == "static" and style == "modelslim")
        )
    assert model.lm_head is None or model.lm_head.weight.dtype == torch.float32


def test_a_lost_offset_would_be_seen(tmp_path: Path) -> None:
    """The bound above can fail: without the offset's correction the same model is far off."""
    folder, stands_for = write(tmp_path / "m", "llama", "asymmetric")
    model = loaded(folder)
    for layer in model.modules():
        if isinstance(layer, W8A8Linear):
            layer.quant_bias = None
    assert nrmse(logits(model), logits(stands_for)) > QUANTISED


@pytest.mark.parametrize("style", ["compressed", "modelslim"])
@pytest.mark.parametrize("part", ["q_proj", "v_proj"])
def test_parts_of_one_product_may_have_inputs_of_different_scales(
    tmp_path: Path, style: str, part: str
) -> None:
    folder, stands_for = write(tmp_path / "m", "qwen2", "static", style)
    linear = Q_PROJ.replace("q_proj", part)
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    wider = tensors[f"{linear}.input_scale"] * 1.5
    changes = {f"{linear}.input_scale": wider}
    if style == "modelslim":
        deq = tensors[f"{linear}.deq_scale"]
        bias = tensors[f"{linear}.quant_bias"] * deq
        changes[f"{linear}.deq_scale"] = deq * 1.5
        changes[f"{linear}.quant_bias"] = (bias / (deq * 1.5)).round().to(torch.int32)
    change(folder, **{name.replace(".", "__"): tensor for name, tensor in changes.items()})
    model = loaded(folder)
    layer = model.model.layers[0].self_attn.qkv_proj
    assert torch.equal(layer.input_scale, wider)  # covers the others', which are smaller
    # Those two are rounded to steps that are half as large again; no more than that is lost.
    assert nrmse(logits(model), logits(stands_for)) < QUANTISED


def test_experts_become_float_and_the_router_stays(tmp_path: Path) -> None:
    folder, stands_for = write(tmp_path / "m", "qwen3_moe", "w8")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    changes = {}
    for name, tensor in tensors.items():
        if ".experts." in name:
            scale = tensor.abs().amax(1, keepdim=True) / 127
            changes[name] = (tensor / scale).round().to(torch.int8)
            changes[name.replace(".weight", ".weight_scale")] = scale
    assert changes
    change(folder, **{name.replace(".", "__"): tensor for name, tensor in changes.items()})
    model = loaded(folder)
    experts = model.model.layers[0].mlp.experts
    assert experts.w13.dtype == torch.float32
    stem = "model.layers.0.mlp.experts.2.up_proj"
    expected = changes[f"{stem}.weight"] * changes[f"{stem}.weight_scale"]
    assert torch.equal(experts.w13[2, 24:], expected)
    assert model.model.layers[0].mlp.gate.weight.dtype == torch.float32
    assert nrmse(logits(model), logits(stands_for)) < QUANTISED


@pytest.mark.parametrize("width", [1, 4, 7, 64])
def test_packing_is_undone(width: int) -> None:
    weight = torch.randint(-128, 128, (5, width), dtype=torch.int8)
    out = torch.empty_like(weight)
    words = pack(weight)
    assert words.dtype == torch.int32 and words.shape == (5, -(-width // 4))
    assert words[0, 0] & 255 == int(weight[0, 0]) + 128
    unpack(words, out)
    assert torch.equal(out, weight)


def broken(**changes: object) -> dict[str, object]:
    return {**config_of("static"), **changes}


def group(**changes: object) -> dict[str, object]:
    made = config_of("static")
    made["config_groups"]["group_0"].update(changes)
    return made


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "awq"}, ["quant_method='awq'", "compressed-tensors", "modelslim"]),
        (broken(format="marlin-24"), ["format='marlin-24'", "int-quantized", "pack-quantized"]),
        (broken(config_groups={}), ["config_groups"]),
        (broken(kv_cache_scheme={"num_bits": 8}), ["kv_cache_scheme"]),
        (broken(ignore=["re:("]), ["ignore", "re:("]),
        (broken(sparsity_config="24"), ["sparsity_config='24'", "dense"]),
        ("compressed-tensors", ["quantization_config='compressed-tensors'", "object"]),
        (group(weights=args("channel", num_bits=4)), ["weights.num_bits=4", "8"]),
        (group(weights=args("channel", type="float")), ["weights.type='float'", "int"]),
        (group(weights=args("group")), ["weights.strategy='group'", "channel, tensor"]),
        (group(weights=args("channel", symmetric=False)), ["weights.symmetric=False"]),
        (
            group(input_activations=args("tensor", dynamic=True)),
            ["input_activations.strategy='tensor'", "token"],
        ),
        (
            group(input_activations=args("token", dynamic=True, symmetric=False)),
            ["input_activations.symmetric=False"],
        ),
        (group(output_activations=args("tensor")), ["output_activations"]),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, written: dict[str, Path], config: object, words: list[str]
) -> None:
    folder = copytree(written["compressed"], tmp_path / "m")
    edit(folder, quantization_config=config)
    with pytest.raises(ModelError) as error:
        loaded(folder)
    assert all(word in str(error.value) for word in words), error.value


SCALE = Q_PROJ.replace(".", "__")


@pytest.mark.parametrize(
    ("style", "drop", "tensors", "words"),
    [
        ("compressed", "weight_scale", {}, ["1 missing", f"{Q_PROJ}.weight_scale [64, 1] or [64]"]),
        ("compressed", "input_scale", {}, ["1 missing", f"{Q_PROJ}.input_scale"]),
        ("modelslim", "deq_scale", {}, ["1 missing", f"{Q_PROJ}.deq_scale [64]"]),
        ("modelslim", "quant_bias", {}, ["1 missing", f"{Q_PROJ}.quant_bias [64]"]),
        (
            "compressed",
            "",
            {"weight_scale": torch.ones(7, 1)},
            ["another shape", f"{Q_PROJ}.weight_scale [7, 1]"],
        ),
        ("compressed", "", {"extra": torch.ones(2)}, ["unexpected", f"{Q_PROJ}.extra"]),
        ("compressed", "", {"weight": torch.ones(64, 64)}, [f"{Q_PROJ}.weight", "float32", "int8"]),
        ("compressed", "", {"weight_scale": -torch.ones(64, 1)}, [f"{Q_PROJ}.weight_scale", "negative"]),
        ("compressed", "", {"weight_scale": torch.ones(64, 1).int()}, [f"{Q_PROJ}.weight_scale is int32"]),
        ("compressed", "", {"input_scale": torch.ones(1).bool()}, [f"{Q_PROJ}.input_scale is bool"]),
        ("compressed", "", {"input_scale": torch.zeros(1)}, [f"{Q_PROJ}.input_scale is 0.0", "positive"]),
        ("modelslim", "", {"input_offset": torch.ones(1) / 2}, [f"{Q_PROJ}.input_offset is 0.5", "whole"]),
        ("modelslim", "", {"weight_offset": torch.ones(64, 1)}, [f"{Q_PROJ}.weight_offset", "symmetric"]),
        ("modelslim", "", {"deq_scale": torch.full((64,), torch.nan)}, [f"{Q_PROJ}.deq_scale", "finite"]),
        ("compressed", "", {"weight_scale": torch.zeros(64, 1)}, [f"{Q_PROJ}.weight_scale is 0 for"]),
        ("modelslim", "", {"deq_scale": torch.zeros(64)}, [f"{Q_PROJ}.deq_scale is 0 for"]),
        ("modelslim", "", {"deq_scale": torch.ones(64).int()}, [f"{Q_PROJ}.deq_scale is int32", "int64"]),
        ("modelslim", "", {"deq_scale": torch.full((64,), 2**40)}, [f"{Q_PROJ}.deq_scale", "more than"]),
        ("modelslim", "", {"input_offset": torch.tensor([torch.nan])}, [f"{Q_PROJ}.input_offset is nan"]),
        ("modelslim", "", {"input_offset": torch.tensor([torch.inf])}, [f"{Q_PROJ}.input_offset is inf"]),
        # Its reciprocal is infinite in float32, and 0 times that is no number.
        (
            "compressed",
            "",
            {"input_scale": torch.tensor([1e-42])},
            [f"{Q_PROJ}.input_scale is 1.0", "positive"],
        ),
    ],
)
def test_a_malformed_tensor_is_refused_by_name(
    tmp_path: Path,
    written: dict[str, Path],
    style: str,
    drop: str,
    tensors: dict[str, torch.Tensor],
    words: list[str],
) -> None:
    folder = copytree(written[style], tmp_path / "m")
    changes = {f"{SCALE}__{part}": tensor for part, tensor in tensors.items()}
    change(folder, drop=(f"{Q_PROJ}.{drop}",), **changes)
    with pytest.raises(ModelError) as error:
        loaded(folder)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("style", ["compressed", "modelslim"])
def test_a_row_of_zeros_may_have_a_scale_of_zero(
    tmp_path: Path, written: dict[str, Path], style: str
) -> None:
    folder = copytree(written[style], tmp_path / "m")
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    changes = {}
    for part in ("weight", "weight_scale", "deq_scale", "quant_bias"):
        if (tensor := tensors.get(f"{Q_PROJ}.{part}")) is not None:
            tensor[3] = 0
            changes[f"{SCALE}__{part}"] = tensor
    change(folder, **changes)
    assert logits(loaded(folder)).isfinite().all()


def test_a_bias_that_the_model_lacks_is_not_lost(tmp_path: Path) -> None:
    folder, _ = write(tmp_path / "m", "llama", "dynamic", "modelslim", num_hidden_layers=1)
    change(folder, **{f"{SCALE}__bias": torch.ones(64)})
    with pytest.raises(ModelError, match=rf"1 unexpected:\s+{Q_PROJ}\.bias"):
        loaded(folder)


def test_a_part_of_another_scheme_is_refused(tmp_path: Path, written: dict[str, Path]) -> None:
    folder = copytree(written["compressed"], tmp_path / "m")
    edit(folder, quantization_config={**config_of("static"), "ignore": ["lm_head", Q_PROJ]})
    with pytest.raises(ModelError, match=r"qkv_proj is one product.*q_proj: float.*k_proj: w8a8-static"):
        loaded(folder)


@pytest.mark.parametrize("kind", ["W4A4", ["W8A8"], {}, None])
def test_an_unknown_type_of_modelslim_is_refused_by_name(
    tmp_path: Path, written: dict[str, Path], kind: object
) -> None:
    folder = copytree(written["modelslim"], tmp_path / "m")
    path = folder / "quant_model_description.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), f"{Q_PROJ}.weight": kind}))
    words = rf"q_proj\.weight is of type {re.escape(repr(kind))}.*W8A8, W8A8_DYNAMIC, W8A16, FLOAT"
    with pytest.raises(ModelError, match=words):
        loaded(folder)


def test_a_float16_models_deq_scale_is_float_bits_in_int64(tmp_path: Path) -> None:
    folder, stands_for = write(tmp_path / "m", "llama", "static", "modelslim")
    (path,) = folder.glob("*.safetensors")
    bits = {n: t.view(torch.int32).long() for n, t in load_file(path).items() if n.endswith("deq_scale")}
    change(folder, **{name.replace(".", "__"): tensor for name, tensor in bits.items()})
    assert nrmse(logits(loaded(folder)), logits(stands_for)) < EXACT


@pytest.mark.parametrize(
    ("asked", "works"),
    [
        ("auto", True),
        ("w8a8-static", True),
        ("compressed-tensors", True),
        ("none", False),
        ("w8a8-dynamic", False),
        ("w8", False),
        ("ascend", False),
    ],
)
def test_a_request_that_contradicts_the_checkpoint_names_both(
    tmp_path: Path, written: dict[str, Path], asked: str, works: bool
) -> None:
    folder = copytree(written["compressed"], tmp_path / "m")
    if works:
        loaded(folder, asked)
        return
    with pytest.raises(ConfigError) as error:
        loaded(folder, asked)
    assert f"quantization={asked!r}" in str(error.value)
    assert "is a compressed-tensors checkpoint of scheme w8a8-static" in str(error.value)
