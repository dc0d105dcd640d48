"""Int8 linears and decode attention on the device: numbers against the references, and rates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from piecework import ops
from piecework.bench.kernel_timing import Timer, alternate
from piecework.devices import Device

_BOUNDS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Call:
    """An op's call, what it is compared with, and the bytes that it has to read."""

    op: str
    shape: str
    args: tuple[Any, ...]
    others: dict[str, Callable[[], Any]]
    nbytes: int


def _placed(device: Device, tensor: Tensor) -> Tensor:
    """Copy into memory that the device's captures may read."""
    return device.zeros(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def linears(
    device: Device, dtype: torch.dtype, rows: tuple[int, ...], shapes: tuple[tuple[int, int], ...]
) -> Iterator[Call]:
    """W8A8 and weight-only products; the others are the product in dtype and, for W8A8, torch's int8 one."""
    for count, (outputs, inputs) in product(rows, shapes):
        int8_weight = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
        int8_x = torch.randint(-128, 128, (count, inputs), dtype=torch.int8)
        weight, x = _placed(device, int8_weight), _placed(device, int8_x)
        wide, wide_weight = (_placed(device, t.to(dtype)) for t in (int8_x / 64, int8_weight))
        scale = _placed(device, torch.rand(outputs) / 1000)
        x_scale = _placed(device, torch.rand(count, 1))
        offset = _placed(device, torch.randint(-999, 999, (outputs,), dtype=torch.int32))
        others: dict[str, Callable[[], Any]] = {"linear": partial(F.linear, wide, wide_weight)}
        shape = f"{count}x{inputs}x{outputs}"
        yield Call("linear_w8", shape, (wide, weight, scale, None), others, weight.nbytes + wide.nbytes)
        if count > 16 and inputs % 8 == 0 and outputs % 8 == 0:
            others = {**others, "_int_mm": partial(torch._int_mm, x, weight.t())}
        args = (x, weight, scale, x_scale, offset, None, dtype)
        yield Call("linear_w8a8", shape, args, others, weight.nbytes + x.nbytes)


def attentions(
    device: Device, dtype: torch.dtype, batches: tuple[int, ...], contexts: tuple[int, ...], dim: int
) -> Iterator[Call]:
    """Decode at each batch and context, 32 query heads to 8 of keys; the other is the kernel in torch."""
    heads, kv_heads, page = 32, 8, 16
    for batch, context in product(batches, contexts):
        pages = -(-context // page)
        table = (torch.randperm(batch * pages, dtype=torch.int32) + 1).view(batch, pages)
        last = context - 1
        slots = table[:, last // page] * page + last % page
        shape = (batch * pages + 1, kv_heads, page, dim)
        caches = [_placed(device, torch.randn(shape).to(dtype)) for _ in "kv"]
        heads_of = (heads, kv_heads, kv_heads)
        q, k, v = (_placed(device, torch.randn(batch, n, dim).to(dtype)) for n in heads_of)
        starts = torch.arange(batch + 1, dtype=torch.int32)
        lengths = torch.full((batch,), context, dtype=torch.int32)
        index = [_placed(device, t) for t in (slots, table, starts, lengths)]
        out = device.zeros(tuple(q.shape), dtype)
        args = (q, k, v, out, *caches, *index, 1, dim**-0.5, 0)
        others: dict[str, Callable[[], Any]] = {}
        if device.torch_device.type == "cuda":
            others["torch"] = partial(ops.get("paged_attention").implementations["cuda"].run, *args)
        nbytes = 2 * batch * context * kv_heads * dim * dtype.itemsize
        yield Call("paged_attention", f"{batch}x{context}", args, others, nbytes)


@torch.inference_mode()
def check_calls(device: Device, calls: Iterator[Call]) -> list[dict[str, Any]]:
    """Compare each call with the op's reference, and W8A8 products exactly before they are scaled."""
    rows = []
    for call in calls:
        op = ops.get(call.op)
        chosen = op.resolve(device.op_order, *call.args)
        found, expected = (_result(run, call.args) for run in (chosen.run, op.reference))
        bound = _BOUNDS[found.dtype] * float(expected.abs().max())
        error = float((found.double() - expected.double()).abs().max())
        ok = error <= bound
        if call.op == "linear_w8a8":
            ok = ok and _exact(chosen.run, *call.args[:2])
        rows.append({"op": call.op, "shape": call.shape, "by": chosen.name, "error": error, "ok": ok})
    return rows


def _result(run: Callable[..., Any], args: tuple[Any, ...]) -> Tensor:
    value = run(*args)
    return args[3].clone() if value is None else value


def _exact(run: Callable[..., Tensor], x: Tensor, weight: Tensor) -> bool:
    """Whether the product is that of int64, for one in eight of the weight's rows."""
    one = torch.ones(weight.shape[0], device=x.device)
    product_ = run(x, weight, one, None, None, None, torch.float32)[:, ::8].cpu()
    oracle = (x.double() @ weight[::8].double().t()).cpu()  # below 2^53, so exact
    return torch.equal(product_, oracle.float())


@torch.inference_mode()
def time_calls(device: Device, calls: Iterator[Call], repeats: int, seconds: float) -> list[dict[str, Any]]:
    """Time each call and its others in graphs of many calls, in turns."""
    timer = Timer(device, seconds)
    rows = []
    for call in calls:
        run = ops.get(call.op).resolve(device.op_order, *call.args).run
        runs = [partial(run, *call.args), *call.others.values()]
        mine, *others = (median(times) for times in alternate([timer.sample(r) for r in runs], repeats))
        ratios = dict(zip(call.others, (other / mine for other in others), strict=True))
        rows.append(
            {
                "op": call.op,
                "shape": call.shape,
                "us": mine * 1e6,
                "gb_per_s": call.nbytes / mine / 1e9,
                "faster_than": ", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items()) or "-",
            }
        )
    return rows
