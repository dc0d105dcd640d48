"""The NPU implementations over a torch_npu in plain torch: right arguments, results in the right places."""

from __future__ import annotations

import inspect
import logging
import sys
from typing import Any

import fake_torch_npu
import pytest
import torch
from torch import Tensor

from piecework import ops
from piecework.ops.npu import heads, vendor
from piecework.ops.npu.vendor import FUNCTIONS, MAPPING, Function, call

PRIVATE = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
T, H = 5, 64


class Recorder:
    """Stands where torch_npu would; `called` are the functions of the fake that ran."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            inspect.signature(function).bind(*args, **kwargs)  # as torch's own check of a schema
            self.called.append(name)
            return function(*args, **kwargs)

        function = getattr(fake_torch_npu, name)
        return run


@pytest.fixture
def torch_npu(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "torch_npu", recorder)  # type: ignore[arg-type]
    monkeypatch.setattr(heads, "ascend_triton", lambda: False)
    return recorder


def rows(width: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(T, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight(size: int = H, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return 1 + 0.1 * torch.randn(size, generator=torch.Generator().manual_seed(7)).to(dtype)


def scales() -> tuple[Tensor, Tensor]:
    return torch.tensor([0.03]), torch.tensor([1 / 0.03])


def int8(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(3))


def table(dim: int) -> Tensor:
    angles = torch.rand(32, dim // 2, generator=torch.Generator().manual_seed(2)) * 6
    return torch.cat((angles.cos(), angles.sin()), -1)


POSITIONS = torch.tensor([3, 0, 31, 7, 7])
OFFSET = torch.tensor([4.0])
NORM = (rows(H), weight(), 1e-5)
ADD = (rows(H), rows(H, seed=1), weight(), 1e-5)
QKV = (rows(8 * 16), POSITIONS)


def experts(*shape: int) -> Tensor:
    return (0.2 * torch.randn(4, *shape, generator=torch.Generator().manual_seed(4))).to(torch.bfloat16)


EXPERTS = (rows(H), rows(4, seed=1), experts(16, H), experts(H, 8), 2)
CASES: list[tuple[str, tuple[Any, ...]]] = [
    ("rms_norm", NORM),
    ("rms_norm", (rows(H, torch.float32), weight(dtype=torch.float32), 1e-6)),
    ("add_rms_norm", ADD),
    ("rms_norm_quant", (*NORM, *scales())),
    ("rms_norm_dynamic_quant", NORM),
    ("add_rms_norm_quant", (*ADD, *scales())),
    ("add_rms_norm_quant", (*ADD, *scales(), OFFSET)),
    ("add_rms_norm_dynamic_quant", ADD),
    ("quantize", (rows(H), *scales(), OFFSET)),
    ("quantize", (rows(H, torch.float16), *scales())),
    ("dynamic_quantize", (rows(H),)),
    ("linear_w8a8", (int8(T, H), int8(24, H), torch.rand(24) / 99, None, None, None, torch.bfloat16)),
    (
        "linear_w8a8",
        (
            int8(T, H),
            int8(24, H),
            torch.rand(24) / 99,
            torch.rand(T, 1),
            torch.arange(24, dtype=torch.int32),
            rows(24)[0],
            torch.float16,
        ),
    ),
    (
        "linear_w8a8",
        (int8(2, T, H), int8(24, H), torch.rand(24), torch.rand(2, T, 1), None, None, torch.bfloat16),
    ),
    ("linear_w8", (rows(H), int8(24, H), torch.rand(24) / 99, rows(24)[0])),
    ("moe", (*EXPERTS, True)),
    ("moe", (*EXPERTS, False, torch.tensor([3]))),
    ("silu_and_mul", (rows(2 * H),)),
    ("silu_mul_quant", (rows(2 * H), *scales())),
    ("silu_mul_dynamic_quant", (rows(2 * H),)),
    ("rotary", (POSITIONS, rows(64).view(T, 4, 16), rows(32, seed=1).view(T, 2, 16), table(16))),
    ("rotary", (POSITIONS, rows(64).view(T, 4, 16), rows(32, seed=1).view(T, 2, 16), table(8), True)),
    ("split_qkv_rope", (*QKV, table(16), 4, 2)),
    ("split_qkv_rope", (*QKV, table(8), 4, 2, True)),
    ("split_qkv_rmsnorm_rope", (*QKV, table(16), weight(16), weight(16), 1e-5, 4, 2)),
    (
        "split_qkv_rmsnorm_rope",
        (*QKV, table(16), weight(16), weight(16), 1e-5, 4, 2, weight(16), weight(16)),
    ),
]


def test_the_table_names_every_implementation() -> None:
    implemented = {name for name in ops.names() if "npu" in ops.get(name).implementations}
    assert implemented == set(MAPPING)
    assert {name for used in MAPPING.values() for name in used} == set(FUNCTIONS)
    assert {name for name, _ in CASES} == set(MAPPING) - {"paged_attention"}


@pytest.mark.parametrize(("name", "args"), CASES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(CASES)])
def test_means_what_the_reference_means(name: str, args: tuple[Any, ...], torch_npu: Recorder) -> None:
    op = ops.get(name)
    found = op.overload.redispatch(PRIVATE, *args)
    assert set(torch_npu.called) == set(MAPPING[name])
    expected = op.reference(*args)
    many = [(found, expected)] if isinstance(found, Tensor) else list(zip(found, expected, strict=True))
    for got, wanted in many:
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        off = (got.double() - wanted.double()).abs()
        if wanted.dtype == torch.int8:
            assert off.max() <= 1 and (off > 0).double().mean() <= 0.01
        else:
            exact = wanted.dtype == torch.float32
            assert off.max() <= (1e-6 if exact else 2**-6) * wanted.double().abs().max()
    if name.startswith("split_qkv"):
        assert len(found) == 2 and all(part.is_contiguous() for part in found)


@pytest.mark.parametrize("lengths", [[1, 130, 0, 300], [3, 140]])
def test_paged_attention(lengths: list[int], torch_npu: Recorder) -> None:
    decode = lengths[0] == 1
    # In decode every sequence has its row, one without tokens too.
    starts = list(range(len(lengths) + 1)) if decode else [0, 3, 12]
    total, size, padding = starts[-1], 128, 0 if decode else 2
    generator = torch.Generator().manual_seed(5)

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    q, k, v = made(total + padding, 4, 32), made(total + padding, 2, 32), made(total + padding, 2, 32)
    caches = made(7, 2, size, 32), made(7, 2, size, 32)
    page_table = torch.tensor([[1, 0, 0], [2, 5, 0], [0, 0, 0], [3, 4, 6]])[
        [0, 1, 2, 3] if decode else [0, 1]
    ]
    slots = []
    for b, length in enumerate(lengths):
        count = starts[b + 1] - starts[b]
        positions = [max(0, p) for p in range(length - count, length)]
        slots += [int(page_table[b, p // size]) * size + p % size for p in positions]
    slots += [0] * padding
    context = torch.tensor(lengths)
    rest = (torch.tensor(slots), page_table, torch.tensor(starts), context, 1 if decode else 9, 0.2, 0)
    out, expected = made(*q.shape), made(*q.shape)
    copies = [cache.clone() for cache in caches]
    op = ops.get("paged_attention")
    op.overload.redispatch(PRIVATE, q, k, v, out, *caches, *rest)
    assert torch_npu.called == ["npu_fused_infer_attention_score"] * (1 if decode else 2)
    live = [row for row in range(total) if not decode or lengths[row]]
    oracle = ops.get("paged_attention").reference
    if decode:  # the reference has no rows of sequences without tokens
        for row in live:
            one = slice(row, row + 1)
            single = (rest[0][one], page_table[one], torch.tensor([0, 1]), context[one], 1, 0.2, 0)
            oracle(q[one], k[one], v[one], expected[one], *copies, *single)
        assert not out[[row for row in range(total) if row not in live]].any()
    else:
        oracle(q, k, v, expected, *copies, *rest)
        assert not out[total:].any()
    torch.testing.assert_close(out[live], expected[live], atol=2e-2, rtol=2e-2)


def test_calls_that_torch_npu_does_not_take_go_elsewhere(torch_npu: Recorder) -> None:
    order = ("npu", "reference")
    wide = rows(H, torch.float32)
    norm = weight(dtype=torch.float32)
    assert ops.get("dynamic_quantize").resolve(order, rows(H)).name == "npu"
    for name, args in [
        ("dynamic_quantize", (wide,)),
        ("add_rms_norm_quant", (wide, wide, norm, 1e-5, *scales())),
        ("rms_norm", (rows(H), norm, 1e-5)),
        ("linear_w8a8", (int8(T, H), int8(8, H), torch.rand(8), None, None, None, torch.float32)),
        ("rotary", (POSITIONS, rows(900).view(T, 1, 900), rows(900).view(T, 1, 900), table(8))),
    ]:
        assert ops.get(name).resolve(order, *args).name == "reference", name
    assert torch_npu.called == []


def test_without_torch_npu_nothing_of_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)  # type: ignore[arg-type]
    monkeypatch.setattr(vendor, "_installed", lambda name: False)
    for name, args in CASES:
        assert ops.get(name).resolve(("npu", "reference"), *args).name == "reference"
    found = ops.get("rms_norm").overload.redispatch(PRIVATE, *NORM)
    assert torch.equal(found, ops.get("rms_norm").reference(*NORM))


def test_a_call_has_the_arguments_of_the_table(torch_npu: Recorder) -> None:
    with pytest.raises(TypeError, match=r"npu_rms_norm is called with other arguments .*: eps, epsilon"):
        call("npu_rms_norm", self=rows(H), gamma=weight(), eps=1e-5)
    with pytest.raises(TypeError, match="gamma"):
        call("npu_rms_norm", self=rows(H), epsilon=1e-5)
    assert torch_npu.called == []


def test_a_changed_table_changes_the_call(torch_npu: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FUNCTIONS, "npu_rms_norm", Function(("self", "gamma"), ("eps",), results=2))
    with pytest.raises(TypeError, match="unexpected keyword argument 'eps'"):
        call("npu_rms_norm", self=rows(H), gamma=weight(), eps=1e-5)


def test_the_missing_fusion_is_told_once(torch_npu: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    heads._tell_once.cache_clear()
    op = ops.get("split_qkv_rmsnorm_rope")
    args = (*QKV, table(16), weight(16), weight(16), 1e-5, 4, 2)
    with caplog.at_level(logging.WARNING, "piecework.ops.npu"):
        op.overload.redispatch(PRIVATE, *args)
        op.overload.redispatch(PRIVATE, *args)
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "split_qkv_rmsnorm_rope runs as two norms and rotary"
    ]


def test_the_triton_kernel_runs_where_there_is_triton_ascend(
    torch_npu: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = ops.get("split_qkv_rmsnorm_rope")
    ran: list[tuple[Any, ...]] = []

    def kernel(*args: Any) -> Any:
        ran.append(args)
        return op.reference(*args)

    monkeypatch.setattr(heads, "ascend_triton", lambda: True)
    monkeypatch.setitem(op.implementations, "triton", ops.Implementation("triton", kernel))
    op.overload.redispatch(PRIVATE, *QKV, table(16), weight(16), weight(16), 1e-5, 4, 2)
    assert len(ran) == 1 and torch_npu.called == []
