"""The fused ops that `bench kernels` times, their inputs, and the sequences that they replace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from piecework import ops
from piecework.devices import Device
from piecework.errors import ConfigError

EPS = 1e-6
_ROTARY_POSITIONS = 4096
# Head sizes of models whose hidden size is below 2048, and of larger ones.
_SMALL_HEAD, _HEAD = 64, 128

Result = Sequence[Tensor]
Run = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One fused op on one set of inputs.

    `sequences` map what a sequence is made of to the sequence; they and `fused` give the same tensors as
    `reference`, views that a program takes beside the op among them. `nbytes` are read and written by the
    fused op at least once: its arguments (of the rotary table the rows used, of a projection what it turns)
    and its results.
    """

    op: str
    implementation: str
    fused: Run
    reference: Run
    sequences: dict[str, Run]
    nbytes: int


@dataclass(frozen=True)
class Inputs:
    """Makes inputs on a device; the same seed gives the same ones."""

    device: Device
    dtype: torch.dtype
    hidden: int
    tokens: int
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def on_device(self, tensor: Tensor) -> Tensor:
        """Copy into memory that the device's captures may read."""
        placed = self.device.zeros(tuple(tensor.shape), tensor.dtype)
        placed.copy_(tensor)
        return placed

    def rows(self, width: int) -> Tensor:
        """Standard normal [tokens, width]."""
        return self.on_device(torch.randn(self.tokens, width, generator=self.generator).to(self.dtype))

    def weight(self, size: int) -> Tensor:
        """A norm's weight [size], around 1."""
        made = 1 + 0.1 * torch.randn(size, generator=self.generator)
        return self.on_device(made.to(self.dtype))

    def scale(self, largest: float) -> tuple[Tensor, Tensor]:
        """A static scale under which `largest` is 127, and its reciprocal, both [1] float32."""
        scale = torch.tensor([largest / 127])
        return self.on_device(scale), self.on_device(1 / scale)


class Chosen:
    """Calls ops through a device's implementations, chosen at an op's first call, as for a program."""

    def __init__(self, order: Sequence[str]) -> None:
        self._order = order
        self._runs: dict[str, ops.Implementation] = {}

    def choose(self, name: str, *args: Any) -> ops.Implementation:
        """Return what runs the op `name`."""
        if name not in self._runs:
            self._runs[name] = ops.get(name).resolve(self._order, *args)
        return self._runs[name]

    def __call__(self, name: str, *args: Any) -> Any:
        return self.choose(name, *args).run(*args)


class _Work(NamedTuple):
    """Arguments of a fused op, the sequences that it replaces, and the view that stays beside it."""

    args: tuple[Any, ...]
    sequences: dict[str, Run]
    values: Callable[[], Tensor] | None = None


def _add_rms_norm(x: Inputs, call: Chosen) -> _Work:
    args = (x.rows(x.hidden), x.rows(x.hidden), x.weight(x.hidden), EPS)

    def apart() -> Result:
        total = args[0] + args[1]
        return call("rms_norm", total, *args[2:]), total

    return _Work(args, {"add, rms_norm": apart})


def _rms_norm_quant(x: Inputs, call: Chosen) -> _Work:
    norm, scales = (x.rows(x.hidden), x.weight(x.hidden), EPS), x.scale(4.0)
    apart = lambda: (call("quantize", call("rms_norm", *norm), *scales),)  # noqa: E731
    return _Work((*norm, *scales), {"rms_norm, quantize": apart})


def _rms_norm_dynamic_quant(x: Inputs, call: Chosen) -> _Work:
    args = (x.rows(x.hidden), x.weight(x.hidden), EPS)
    return _Work(
        args, {"rms_norm, dynamic_quantize": lambda: call("dynamic_quantize", call("rms_norm", *args))}
    )


def _add_rms_norm_quant(x: Inputs, call: Chosen) -> _Work:
    norm, scales = (x.rows(x.hidden), x.rows(x.hidden), x.weight(x.hidden), EPS), x.scale(4.0)

    def apart() -> Result:
        total = norm[0] + norm[1]
        return call("quantize", call("rms_norm", total, *norm[2:]), *scales), total

    def half() -> Result:
        y, total = call("add_rms_norm", *norm)
        return call("quantize", y, *scales), total

    return _Work((*norm, *scales), {"add, rms_norm, quantize": apart, "add_rms_norm, quantize": half})


def _add_rms_norm_dynamic_quant(x: Inputs, call: Chosen) -> _Work:
    args = (x.rows(x.hidden), x.rows(x.hidden), x.weight(x.hidden), EPS)

    def apart() -> Result:
        total = args[0] + args[1]
        q, scale = call("dynamic_quantize", call("rms_norm", total, *args[2:]))
        return q, total, scale

    def half() -> Result:
        y, total = call("add_rms_norm", *args)
        q, scale = call("dynamic_quantize", y)
        return q, total, scale

    return _Work(args, {"add, rms_norm, dynamic_quantize": apart, "add_rms_norm, dynamic_quantize": half})


def _silu_mul_quant(x: Inputs, call: Chosen) -> _Work:
    gate, scales = x.rows(2 * x.hidden), x.scale(6.0)
    apart = lambda: (call("quantize", call("silu_and_mul", gate), *scales),)  # noqa: E731
    return _Work((gate, *scales), {"silu_and_mul, quantize": apart})


def _silu_mul_dynamic_quant(x: Inputs, call: Chosen) -> _Work:
    gate = x.rows(2 * x.hidden)
    apart = lambda: call("dynamic_quantize", call("silu_and_mul", gate))  # noqa: E731
    return _Work((gate,), {"silu_and_mul, dynamic_quantize": apart})


@dataclass(frozen=True)
class _Heads:
    """Attention's shape for a hidden size: about three query heads to one of keys."""

    dim: int
    queries: int
    keys: int

    @classmethod
    def of(cls, hidden: int) -> _Heads:
        dim = _SMALL_HEAD if hidden < 2048 else _HEAD
        if hidden % dim:
            raise ConfigError("hidden", hidden, f"a multiple of {dim} for the ops with heads")
        queries = hidden // dim
        keys = max(n for n in range(1, max(2, queries // 3 + 1)) if queries % n == 0)
        return cls(dim, queries, keys)

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of qkv, as a program cuts it without the fused op."""
        q, k, v = qkv.split([self.queries * self.dim, self.keys * self.dim, self.keys * self.dim], -1)
        q, k = q.view(-1, self.queries, self.dim), k.view(-1, self.keys, self.dim)
        return q, k, v.view(-1, self.keys, self.dim)

    def values(self, qkv: Tensor) -> Tensor:
        """The last of these views, as a program takes it beside the fused op."""
        return qkv.view(-1, self.queries + 2 * self.keys, self.dim)[:, self.queries + self.keys :]


def _rope_inputs(x: Inputs) -> tuple[_Heads, Tensor, Tensor, Tensor]:
    heads = _Heads.of(x.hidden)
    qkv = x.rows((heads.queries + 2 * heads.keys) * heads.dim)
    positions = x.on_device(torch.randint(_ROTARY_POSITIONS, (x.tokens,), generator=x.generator))
    angles = torch.rand(_ROTARY_POSITIONS, heads.dim // 2, generator=x.generator) * 6
    return heads, qkv, positions, x.on_device(torch.cat((angles.cos(), angles.sin()), -1))


def _split_qkv_rope(x: Inputs, call: Chosen) -> _Work:
    heads, qkv, positions, table = _rope_inputs(x)

    def apart() -> Result:
        q, k, v = heads.split(qkv)
        q, k = call("rotary", positions, q, k, table)
        return q, k, v

    args = (qkv, positions, table, heads.queries, heads.keys)
    return _Work(args, {"split, rotary": apart}, lambda: heads.values(qkv))


def _split_qkv_rmsnorm_rope(x: Inputs, call: Chosen) -> _Work:
    heads, qkv, positions, table = _rope_inputs(x)
    weights = x.weight(heads.dim), x.weight(heads.dim)

    def apart() -> Result:
        q, k, v = heads.split(qkv)
        q, k = call("rms_norm", q, weights[0], EPS), call("rms_norm", k, weights[1], EPS)
        q, k = call("rotary", positions, q, k, table)
        return q, k, v

    args = (qkv, positions, table, *weights, EPS, heads.queries, heads.keys)
    return _Work(args, {"split, rms_norm, rms_norm, rotary": apart}, lambda: heads.values(qkv))


_MAKERS: dict[str, Callable[[Inputs, Chosen], _Work]] = {
    "add_rms_norm": _add_rms_norm,
    "rms_norm_quant": _rms_norm_quant,
    "rms_norm_dynamic_quant": _rms_norm_dynamic_quant,
    "add_rms_norm_quant": _add_rms_norm_quant,
    "add_rms_norm_dynamic_quant": _add_rms_norm_dynamic_quant,
    "silu_mul_quant": _silu_mul_quant,
    "silu_mul_dynamic_quant": _silu_mul_dynamic_quant,
    "split_qkv_rope": _split_qkv_rope,
    "split_qkv_rmsnorm_rope": _split_qkv_rmsnorm_rope,
}
OPS = tuple(_MAKERS)
"""The names of the ops that can be timed."""


def make_case(op: str, inputs: Inputs) -> Case:
    """Make the case of one op of `OPS`."""
    call = Chosen(inputs.device.op_order)
    args, sequences, values = _MAKERS[op](inputs, call)
    chosen = call.choose(op, *args)

    def beside(run: Callable[..., Any]) -> Run:
        if values is None:
            return lambda: run(*args)
        return lambda: (*run(*args), values())

    moved = _nbytes(args, inputs.tokens) + _nbytes(as_tensors(chosen.run(*args)), inputs.tokens)
    return Case(
        op=op,
        implementation=chosen.name,
        fused=beside(chosen.run),
        reference=beside(ops.get(op).reference),
        sequences=sequences,
        nbytes=moved if values is None else moved - values().nbytes,
    )


def as_tensors(result: Any) -> tuple[Tensor, ...]:
    """Return an op's results as a tuple, of one too."""
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _nbytes(values: Sequence[Any], tokens: int) -> int:
    """Bytes of the tensors among `values`; of the rotary table those of one row a token."""
    sizes = []
    for value in values:
        if isinstance(value, Tensor):
            rotary = value.dim() == 2 and value.shape[0] == _ROTARY_POSITIONS != tokens
            sizes.append(value.nbytes // _ROTARY_POSITIONS * tokens if rotary else value.nbytes)
    return sum(sizes)
