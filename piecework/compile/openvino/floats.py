"""Converters of the named ops on floats: what each op's reference means, in OpenVINO's operations."""

from __future__ import annotations

from typing import Any

import openvino as ov
from openvino import opset15 as opset

from piecework.compile.openvino.convert import converter
from piecework.compile.openvino.parts import (
    add,
    cast,
    ints,
    join,
    multiply,
    parts,
    reshape,
    scalar,
    sections,
    size,
    unsqueeze,
    wide,
)


@converter("piecework::embedding")
def embedding(ids: Any, weight: Any) -> Any:
    """Rows of the table."""
    return opset.gather(weight, ids, opset.constant(0, ov.Type.i64)).output(0)


@converter("piecework::linear")
def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """A product with the transposed weight."""
    y = opset.matmul(x, weight, False, True).output(0)
    return y if bias is None else add(y, bias)


@converter("piecework::rms_norm")
def rms_norm(x: Any, weight: Any, eps: float) -> Any:
    """Spelled as the plug-ins' own pattern of an RMS norm, which they fuse."""
    w = wide(x)
    mean = opset.reduce_mean(opset.power(w, scalar(2.0, w)), ints([-1]), True).output(0)
    root = opset.sqrt(add(mean, scalar(eps, mean))).output(0)
    normed = multiply(w, opset.divide(scalar(1.0, root), root).output(0))
    return multiply(cast(normed, x.get_element_type()), weight)


@converter("piecework::add_rms_norm")
def add_rms_norm(x: Any, residual: Any, weight: Any, eps: float) -> tuple[Any, Any]:
    """The norm of a sum, and the sum."""
    total = add(x, residual)
    return rms_norm(total, weight, eps), total


@converter("piecework::silu_and_mul")
def silu_and_mul(x: Any) -> Any:
    """The gate of a SwiGLU block."""
    gate, up = parts(x, 2)
    return multiply(opset.swish(gate, scalar(1.0, gate)).output(0), up)


def _angles(positions: Any, cos_sin: Any) -> tuple[Any, Any]:
    """Cosines and sines [T, 1, R / 2] at the positions."""
    rows = opset.gather(cos_sin, positions, opset.constant(0, ov.Type.i64)).output(0)
    cos, sin = parts(unsqueeze(rows, 1), 2)
    return cos, sin


def _rotate(x: Any, angles: tuple[Any, Any], interleaved: bool) -> Any:
    cos, sin = angles
    half, width = size(cos, 2), size(x, 2)
    turned, rest = (x, None) if width == 2 * half else sections(x, 2, (2 * half, width - 2 * half))
    turned = wide(turned)
    if interleaved:
        pairs = parts(reshape(turned, (-1, size(x, 1), half, 2)), 2)
        first, second = (reshape(part, (-1, size(x, 1), half)) for part in pairs)
    else:
        first, second = parts(turned, 2)
    a = opset.subtract(multiply(first, cos), multiply(second, sin)).output(0)
    b = add(multiply(second, cos), multiply(first, sin))
    if interleaved:
        out = reshape(join((unsqueeze(a, 3), unsqueeze(b, 3)), 3), (-1, size(x, 1), 2 * half))
    else:
        out = join((a, b), 2)
    out = cast(out, x.get_element_type())
    return out if rest is None else join((out, rest), 2)


@converter("piecework::rotary")
def rotary(positions: Any, q: Any, k: Any, cos_sin: Any, interleaved: bool = False) -> tuple[Any, Any]:
    """Queries and keys turned by their positions."""
    angles = _angles(positions, cos_sin)
    return _rotate(q, angles, interleaved), _rotate(k, angles, interleaved)


def _heads(qkv: Any, count: int) -> Any:
    return reshape(qkv, (-1, count, size(qkv, 1) // count))


@converter("piecework::split_qkv_rope")
def split_qkv_rope(
    qkv: Any, positions: Any, cos_sin: Any, num_heads: int, num_kv_heads: int, interleaved: bool = False
) -> tuple[Any, Any]:
    """Heads of queries and keys lie side by side, so they turn as one."""
    heads = _heads(qkv, num_heads + 2 * num_kv_heads)
    turning, _ = sections(heads, 1, (num_heads + num_kv_heads, num_kv_heads))
    turned = _rotate(turning, _angles(positions, cos_sin), interleaved)
    q, k = sections(turned, 1, (num_heads, num_kv_heads))
    return q, k


@converter("piecework::split_qkv_rmsnorm_rope")
def split_qkv_rmsnorm_rope(
    qkv: Any,
    positions: Any,
    cos_sin: Any,
    q_weight: Any,
    k_weight: Any,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    q_bias: Any = None,
    k_bias: Any = None,
    interleaved: bool = False,
) -> tuple[Any, Any]:
    """The same with a norm over each head's channels before the rotation."""
    heads = _heads(qkv, num_heads + 2 * num_kv_heads)
    q, k, _ = sections(heads, 1, (num_heads, num_kv_heads, num_kv_heads))
    q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    q = q if q_bias is None else add(q, q_bias)
    k = k if k_bias is None else add(k, k_bias)
    turned: tuple[Any, Any] = rotary(positions, q, k, cos_sin, interleaved)
    return turned


@converter("piecework::moe")
def moe(
    x: Any, router_logits: Any, w13: Any, w2: Any, top_k: int, renormalize: bool, num_valid_rows: Any = None
) -> Any:
    """All experts on all rows, as the reference: a model of OpenVINO's can't choose which products it makes.

    They are two products: the second adds up over experts too, since it is linear in the weighted gates.
    """
    count, double, hidden = (size(w13, axis) for axis in range(3))
    share = unsqueeze(_share(x, router_logits, count, top_k, renormalize, num_valid_rows), 2)
    first = reshape(w13, (count * double, hidden))
    gates = silu_and_mul(reshape(linear(x, first), (-1, count, double)))  # [T, E, I]
    shared = multiply(gates, cast(share, gates.get_element_type()))
    second = reshape(opset.transpose(w2, ints([1, 0, 2])).output(0), (hidden, count * double // 2))
    return linear(reshape(shared, (-1, count * double // 2)), second)


def _share(
    x: Any, router_logits: Any, experts: int, top_k: int, renormalize: bool, num_valid_rows: Any
) -> Any:
    """What each expert counts for in each row, zero for those that weren't chosen: [T, E] float32."""
    shares = opset.softmax(wide(router_logits), 1).output(0)
    count = opset.constant(top_k, ov.Type.i64)
    best = opset.topk(shares, count, 1, "max", "value", index_element_type="i64")
    weights, chosen = best.outputs()
    if renormalize:
        weights = opset.divide(weights, opset.reduce_sum(weights, ints([-1]), True)).output(0)
    if num_valid_rows is not None:
        weights = multiply(weights, _valid(x, num_valid_rows))
    one, zero = (opset.constant(value, ov.Type.f32) for value in (1.0, 0.0))
    spread = opset.one_hot(chosen, opset.constant(experts, ov.Type.i64), one, zero, -1).output(0)  # [T, K, E]
    return opset.reduce_sum(multiply(spread, unsqueeze(weights, 2)), ints([1]), False).output(0)


def _valid(x: Any, num_valid_rows: Any) -> Any:
    """One for rows before `num_valid_rows`, zero for the others: [T, 1]."""
    zero, one = (opset.constant(value, ov.Type.i64) for value in (0, 1))
    rows = opset.gather(opset.shape_of(x, "i64"), zero, zero)
    number = opset.range(zero, rows, one, "i64").output(0)
    return unsqueeze(wide(opset.less(number, cast(num_valid_rows, ov.Type.i64)).output(0)), 1)
