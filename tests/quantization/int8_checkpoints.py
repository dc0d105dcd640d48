"""Writes quantised checkpoints of the tiny models, with numbers of its own, and what they stand for.

That is the `transformers` model with weights q * s, whose linears' inputs are rounded as the scheme
says: what an int8 engine has to compute, but for float32's rounding.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny import save_tiny, tiny_model
from torch import Tensor, nn

from piecework.models.config import ModelConfig
from piecework.quantization.choose import choose_reader
from piecework.quantization.load import load_model
from piecework.weights.load import open_checkpoint
from piecework.weights.source import Source

IDS = torch.randint(5, 320, (40,), generator=torch.Generator().manual_seed(7))
KINDS = ("static", "asymmetric", "dynamic", "w8")


def args(strategy: str, **changes: Any) -> dict[str, Any]:
    """Quantisation arguments of compressed-tensors."""
    base = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "group_size": None}
    return {**base, "strategy": strategy, **changes}


def config_of(kind: str) -> dict[str, Any]:
    """The quantization_config of a kind."""
    inputs: dict[str, Any] | None = {
        "static": args("tensor"),
        "asymmetric": args("tensor", symmetric=False),
        "dynamic": args("token", dynamic=True),
        "w8": None,
    }[kind]
    group = {"targets": ["Linear"], "weights": args("channel"), "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", r"re:.*mlp\.gate$"],
        "kv_cache_scheme": None,
    }


def is_quantised(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and name != "lm_head" and not name.endswith("mlp.gate")


def int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round().clamp(-128, 127).to(torch.int8), scale


def ranges(model: Any) -> dict[str, tuple[float, float]]:
    """Least and largest input of every linear over IDS."""
    found: dict[str, tuple[float, float]] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            found[name] = (float(inputs[0].min()), float(inputs[0].max()))

        return hook

    hooks = [m.register_forward_pre_hook(watch(n)) for n, m in model.named_modules() if is_quantised(n, m)]
    model(IDS[None])
    for hook in hooks:
        hook.remove()
    return found


def input_of(kind: str, low: float, high: float) -> tuple[float, int]:
    """Scale and offset of a static input."""
    if kind != "asymmetric":
        return float(torch.tensor(max(-low, high) / 127)), 0
    scale = float(torch.tensor((high - low) / 255))
    return scale, round(-128 - low / scale)


def rounded(kind: str, scale: float, offset: int) -> Callable[..., Any]:
    """A hook that rounds a linear's input as int8 would."""

    def hook(module: nn.Module, inputs: Any) -> Any:
        (x,) = inputs
        step = x.abs().amax(-1, keepdim=True) / 127 if kind == "dynamic" else scale
        return ((((x / step) + offset).round().clamp(-128, 127) - offset) * step,)

    return hook


def write(
    folder: Path, name: str, kind: str, style: str = "compressed", **overrides: Any
) -> tuple[Path, Any]:
    """Write the checkpoint of a tiny model in a kind and style; the folder, and the model it stands for."""
    save_tiny(folder, name, **overrides)
    model = tiny_model(name, **overrides)
    seen = ranges(model)
    tensors = load_file(folder / "model.safetensors")
    described = dict.fromkeys(tensors, "FLOAT")
    for linear, module in model.named_modules():
        if not is_quantised(linear, module):
            continue
        q, scale = int8_rows(module.weight)
        module.weight.copy_(q * scale)
        step, offset = input_of(kind, *seen[linear])
        if kind != "w8":
            module.register_forward_pre_hook(rounded(kind, step, offset))
        made = _modelslim if style == "modelslim" else _compressed
        own = made(kind, q, scale, step, offset, module.bias)
        if "quant_bias" in own and module.bias is not None:  # there it is a whole number of steps
            module.bias.copy_((module.bias / own["deq_scale"]).round() * own["deq_scale"])
        for part in ("weight", "bias"):
            tensors.pop(f"{linear}.{part}", None)
        tensors.update({f"{linear}.{part}": tensor for part, tensor in own.items()})
        label = {"dynamic": "W8A8_DYNAMIC", "w8": "W8A16"}.get(kind, "W8A8")
        described.update({f"{linear}.{part}": label for part in own})
    if style == "modelslim":
        (folder / "model.safetensors").unlink()
        save_file(tensors, folder / "quant_model_weight_w8a8.safetensors")
        about = {"model_quant_type": "W8A8", "version": "1.0.0", **described}
        (folder / "quant_model_description.json").write_text(json.dumps(about))
    else:
        save_file(tensors, folder / "model.safetensors")
        edit(folder, quantization_config=config_of(kind))
    return folder, model


def _compressed(
    kind: str, q: Tensor, scale: Tensor, step: float, offset: int, bias: Tensor | None
) -> dict[str, Tensor]:
    own = {"weight": q, "weight_scale": scale}
    if kind in ("static", "asymmetric"):
        own["input_scale"] = torch.tensor([step])
    if kind == "asymmetric":
        own["input_zero_point"] = torch.tensor([offset], dtype=torch.int8)
    return own if bias is None else {**own, "bias": bias.clone()}


def _modelslim(
    kind: str, q: Tensor, scale: Tensor, step: float, offset: int, bias: Tensor | None
) -> dict[str, Tensor]:
    own = {"weight": q, "weight_scale": scale, "weight_offset": torch.zeros_like(scale)}
    if kind not in ("static", "asymmetric"):
        return own if bias is None else {**own, "bias": bias.clone()}
    deq = step * scale[:, 0]
    folded = -offset * q.sum(1, dtype=torch.int32)
    if bias is not None:
        folded += (bias / deq).round().to(torch.int32)
    own |= {"input_scale": torch.tensor([step]), "input_offset": torch.tensor([float(offset)])}
    return {**own, "quant_bias": folded, "deq_scale": deq}


def edit(folder: Path, **changes: Any) -> None:
    """Change fields of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change(folder: Path, *, drop: tuple[str, ...] = (), **tensors: Tensor) -> None:
    """Drop and replace tensors; `__` in a keyword is a dot."""
    (path,) = folder.glob("*.safetensors")
    kept = {name: tensor for name, tensor in load_file(path).items() if name not in drop}
    save_file({**kept, **{name.replace("__", "."): tensor for name, tensor in tensors.items()}}, path)


def loaded(
    folder: Path, quantization: str = "auto", dtype: torch.dtype = torch.float32, lm_head: str = "auto"
) -> Any:
    """The engine's model of a folder."""
    checkpoint = open_checkpoint(Source("folder", folder))
    try:
        config = ModelConfig.from_dict(checkpoint.config)
        reader = choose_reader(checkpoint, quantization, lm_head)
        cpu = torch.device("cpu")
        return load_model(config, checkpoint, reader, dtype=dtype, device=cpu, max_positions=64)
    finally:
        checkpoint.close()


@torch.inference_mode()
def logits(model: Any) -> Tensor:
    """Logits [T, V] of IDS, of the engine's model or of transformers'."""
    if hasattr(model, "head"):
        found: Tensor = model.head(model(IDS, torch.arange(len(IDS))))
        return found
    found = model(IDS[None]).logits[0]
    return found
