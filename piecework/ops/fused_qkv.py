"""From the packed projection to attention's queries and keys: cut, per-head norms and rotary as one op.

Values stay where the projection put them: a view of it costs nothing, and attention reads it as it lies.
"""

from __future__ import annotations

from torch import Tensor

from piecework.ops.norm import rms_norm
from piecework.ops.registry import define
from piecework.ops.rotary import rotary

QK = tuple[Tensor, Tensor]


def split_heads(qkv: Tensor, num_heads: int, num_kv_heads: int) -> QK:
    """qkv [T, (Hq + 2 Hkv) D] -> views q [T, Hq, D], k [T, Hkv, D]."""
    head_dim = qkv.shape[-1] // (num_heads + 2 * num_kv_heads)
    heads = qkv.view(-1, num_heads + 2 * num_kv_heads, head_dim)
    q, k, _ = heads.split((num_heads, num_kv_heads, num_kv_heads), 1)
    return q, k


def _split_qkv_rope(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    interleaved: bool = False,
) -> QK:
    """qkv [T, (Hq + 2 Hkv) D], positions [T] int64, cos_sin as in `rotary` -> q, k in new memory.

    q [T, Hq, D], k [T, Hkv, D], both contiguous.
    """
    q, k = split_heads(qkv, num_heads, num_kv_heads)
    q, k = rotary.reference(positions, q, k, cos_sin, interleaved)
    return q, k


def _heads_fake(qkv: Tensor, num_heads: int, num_kv_heads: int) -> QK:
    head_dim = qkv.shape[-1] // (num_heads + 2 * num_kv_heads)
    q, k = (qkv.new_empty((qkv.shape[0], n, head_dim)) for n in (num_heads, num_kv_heads))
    return q, k


def _split_qkv_rope_fake(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    interleaved: bool = False,
) -> QK:
    return _heads_fake(qkv, num_heads, num_kv_heads)


def _split_qkv_rmsnorm_rope(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    interleaved: bool = False,
) -> QK:
    """As `split_qkv_rope`, with rms_norm over each head's channels of q and k before the rotation.

    q_weight, k_weight [D], in qkv's dtype; q_bias, k_bias [D] are added to the normed heads.
    """
    q, k = split_heads(qkv, num_heads, num_kv_heads)
    q, k = rms_norm.reference(q, q_weight, eps), rms_norm.reference(k, k_weight, eps)
    if q_bias is not None:
        q = q + q_bias
    if k_bias is not None:
        k = k + k_bias
    q, k = rotary.reference(positions, q, k, cos_sin, interleaved)
    return q, k


def _split_qkv_rmsnorm_rope_fake(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    interleaved: bool = False,
) -> QK:
    return _heads_fake(qkv, num_heads, num_kv_heads)


split_qkv_rope = define(
    "split_qkv_rope(Tensor qkv, Tensor positions, Tensor cos_sin, int num_heads, int num_kv_heads, "
    "bool interleaved=False) -> (Tensor, Tensor)",
    _split_qkv_rope,
    _split_qkv_rope_fake,
)
split_qkv_rmsnorm_rope = define(
    "split_qkv_rmsnorm_rope(Tensor qkv, Tensor positions, Tensor cos_sin, Tensor q_weight, Tensor k_weight, "
    "float eps, int num_heads, int num_kv_heads, Tensor? q_bias=None, Tensor? k_bias=None, "
    "bool interleaved=False) -> (Tensor, Tensor)",
    _split_qkv_rmsnorm_rope,
    _split_qkv_rmsnorm_rope_fake,
)
