"""Each op's implementations agree with its reference, its fake with its shapes, on odd sizes too."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import piecework.ops as ops
from piecework.ops.coded_linear import coded_size
from piecework.ops.registry import DEFAULT_ORDER, UnsupportedOpError, define


def sample_inputs(name: str, tokens: int = 5) -> tuple:
    x = torch.randn(tokens, 24)
    q, k = torch.randn(tokens, 6, 8), torch.randn(tokens, 2, 8)
    residual, weight = torch.randn(tokens, 24), torch.randn(24)
    static = (torch.tensor([0.02]), torch.tensor([50.0]), torch.tensor([3.0]))
    qkv, turn = torch.randn(tokens, 80), (torch.randint(0, 50, (tokens,)), torch.randn(50, 4))
    int8, int8_weight = (torch.randint(-128, 128, (n, 24), dtype=torch.int8) for n in (tokens, 7))
    scale, quant_bias = torch.rand(7), torch.randint(-99, 99, (7,), dtype=torch.int32)
    blocks = torch.randint(0, 50, (2, 2, 144), dtype=torch.uint8)
    w8a8 = (int8, int8_weight, scale, torch.rand(tokens, 1), quant_bias, torch.randn(7), torch.float32)
    return {
        "embedding": (torch.randint(0, 30, (tokens,)), torch.randn(30, 24)),
        "linear": (x, torch.randn(7, 24), torch.randn(7)),
        "rms_norm": (x, torch.randn(24), 1e-5),
        "silu_and_mul": (x,),
        "rotary": (torch.randint(0, 50, (tokens,)), q, k, torch.randn(50, 4), False),
        "moe": (x, torch.randn(tokens, 5), torch.randn(5, 12, 24), torch.randn(5, 24, 6), 2, True),
        "attention": (q, k, torch.randn(tokens, 2, 8), torch.empty(tokens, 6, 8), 0, 0.3, 0),
        "quantize": (x, *static),
        "dynamic_quantize": (x,),
        "add_rms_norm": (x, residual, weight, 1e-5),
        "rms_norm_quant": (x, weight, 1e-5, *static),
        "rms_norm_dynamic_quant": (x, weight, 1e-5),
        "add_rms_norm_quant": (x, residual, weight, 1e-5, *static),
        "add_rms_norm_dynamic_quant": (x, residual, weight, 1e-5),
        "silu_mul_quant": (x, *static),
        "silu_mul_dynamic_quant": (x,),
        "split_qkv_rope": (qkv, *turn, 6, 2),
        "split_qkv_rmsnorm_rope": (qkv, *turn, torch.randn(8), torch.randn(8), 1e-5, 6, 2),
        "linear_w8a8": w8a8,
        "linear_w8": (x, int8_weight, scale, torch.randn(7)),
        "embedding_int8": (torch.randint(0, 7, (tokens,)), int8_weight, scale, torch.bfloat16),
        "linear_blocks": (torch.randn(tokens, 64), blocks, 9, torch.randn(9)),
        "linear_block_parts": (
            torch.randn(tokens, 64),
            blocks.flatten(),
            [9],
            [blocks.shape[-1]],
            torch.randn(9),
        ),
        "embedding_blocks": (torch.randint(0, 9, (tokens,)), blocks, torch.float32),
        "linear_coded": (x.bfloat16(), torch.zeros(coded_size(7, 24), dtype=torch.uint8), 7, None),
        "embedding_coded": (
            torch.randint(0, 7, (tokens,)),
            torch.zeros(coded_size(7, 24), dtype=torch.uint8),
            7,
            24,
        ),
        "all_reduce": (x,),
    }[name]


@pytest.fixture
def one_rank():
    """A group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", [n for n in ops.names() if not n.startswith("paged_attention")])
def test_op_is_registered_everywhere_and_passes_opcheck(name, request):
    if name == "all_reduce":
        request.getfixturevalue("one_rank")
    op = ops.get(name)
    for key in DEFAULT_ORDER:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(op.qualified_name, key)
    for tokens in (1, 5):
        torch.library.opcheck(
            op.overload,
            sample_inputs(name, tokens),
            test_utils=("test_schema", "test_faketensor"),
        )


@pytest.mark.parametrize("name", ["moe"])
@pytest.mark.parametrize("valid", [None, 0, 3, 5])
def test_moe_groups_like_the_reference(name, valid):
    op = ops.get(name)
    args = (*sample_inputs(name), None if valid is None else torch.tensor([valid]))
    torch.testing.assert_close(
        op.implementations["cpu"].run(*args), op.reference(*args), atol=2e-4, rtol=1e-4
    )
    if valid is not None:
        assert not op.reference(*args)[valid:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_matches_torch(dtype):
    x, w = torch.randn(7, 64, dtype=dtype), torch.randn(64, dtype=dtype)
    expected = torch.nn.functional.rms_norm(x.double(), (64,), w.double(), 1e-5)
    torch.testing.assert_close(
        torch.ops.piecework.rms_norm(x, w, 1e-5).double(), expected, atol=3e-2, rtol=2e-2
    )


def test_rotary_turns_pairs_and_passes_the_rest():
    positions = torch.tensor([0, 3])
    angle = torch.arange(4.0)[:, None] * torch.tensor([1.0, 0.5])
    table = torch.cat((angle.cos(), angle.sin()), -1)
    q = torch.randn(2, 1, 6)
    turned, _ = torch.ops.piecework.rotary(positions, q, q, table)
    assert torch.equal(turned[0], q[0]) and torch.equal(turned[:, :, 4:], q[:, :, 4:])
    x, y = q[1, 0, 1], q[1, 0, 3]
    assert turned[1, 0, 1] == pytest.approx(float(x * angle[3, 1].cos() - y * angle[3, 1].sin()), abs=1e-6)
    inter, _ = torch.ops.piecework.rotary(positions, q, q, table, True)
    x, y = q[1, 0, 2], q[1, 0, 3]
    assert inter[1, 0, 3] == pytest.approx(float(y * angle[3, 1].cos() + x * angle[3, 1].sin()), abs=1e-6)


def paged_inputs(
    lengths: list[tuple[int, int]], window: int, page_size: int, padding: int, group: int
) -> tuple:
    """Build a paged_attention call; `lengths` holds (query rows, context) of each sequence."""
    kv_heads, dim = 2, 16
    pages_needed = [-(-context // page_size) for _, context in lengths]
    pool = torch.randperm(sum(pages_needed)) + 1
    table = torch.zeros(len(lengths), max(pages_needed), dtype=torch.int32)
    for b, (count, pages) in enumerate(zip(pages_needed, pool.split(pages_needed), strict=True)):
        table[b, :count] = pages
    shape = (sum(pages_needed) + 1, kv_heads, page_size, dim)
    rows = sum(n for n, _ in lengths) + padding
    slots = torch.zeros(rows, dtype=torch.int32)
    starts = [0]
    for b, (n, context) in enumerate(lengths):
        for i in range(n):
            at = context - n + i
            slots[starts[-1] + i] = table[b, at // page_size] * page_size + at % page_size
        starts.append(starts[-1] + n)
    q = torch.randn(rows, kv_heads * group, dim)
    k, v = torch.randn(rows, kv_heads, dim), torch.randn(rows, kv_heads, dim)
    if padding:
        q[-padding:] = k[-padding:] = v[-padding:] = float("nan")
    out = torch.full_like(q, float("nan"))
    contexts = torch.tensor([c for _, c in lengths], dtype=torch.int32)
    longest = max(n for n, _ in lengths)
    start = torch.tensor(starts, dtype=torch.int32)
    return (
        q,
        k,
        v,
        out,
        torch.randn(shape),
        torch.randn(shape),
        slots,
        table,
        start,
        contexts,
        longest,
        0.25,
        window,
    )


sequences = st.lists(
    st.integers(1, 40).flatmap(lambda c: st.tuples(st.integers(1, c), st.just(c))), min_size=1, max_size=6
)


@settings(max_examples=60, deadline=None)
@given(
    sequences,
    st.sampled_from([0, 1, 5, 64]),
    st.sampled_from([1, 4, 16]),
    st.integers(0, 2),
    st.sampled_from([1, 3]),
)
def test_paged_attention_on_cpu_equals_the_reference(lengths, window, page_size, padding, group):
    op = ops.get("paged_attention")
    args = paged_inputs(lengths, window, page_size, padding, group)
    results = []
    for implementation in (op.reference, op.implementations["cpu"].run):
        copy = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)
        implementation(*copy)
        results.append(copy[3:6])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)
    valid = sum(n for n, _ in lengths)
    assert not results[1][0][valid:].any()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 40).map(lambda context: (1, context)), min_size=1, max_size=6),
    st.sampled_from([0, 5]),
    st.integers(0, 2),
    st.sampled_from([1, 3]),
)
def test_static_paged_attention_decodes_like_the_reference(lengths, window, padding, group):
    op = ops.get("paged_attention")
    args = paged_inputs(lengths, window, 4, padding, group)
    copies = [tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args) for _ in range(2)]
    op.reference(*copies[0])
    op.implementations["cuda"].run(*copies[1])
    for expected, got in zip(copies[0][3:6], copies[1][3:6], strict=True):
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


def test_static_paged_attention_gives_zero_for_a_sequence_without_tokens():
    args = list(paged_inputs([(1, 9), (1, 3)], 0, 4, 0, 1))
    args[9] = torch.tensor([9, 0], dtype=torch.int32)
    args[6][1] = 0
    ops.get("paged_attention").implementations["cuda"].run(*args)
    assert args[3][0].any() and not args[3][1].any()


def test_paged_attention_with_one_page_per_sequence_equals_plain_attention():
    args = paged_inputs([(9, 9)], 0, 16, 0, 3)
    torch.ops.piecework.paged_attention(*args)
    out = torch.empty_like(args[0])
    torch.ops.piecework.attention(*args[:3], out, 0, 0.25, 0)
    torch.testing.assert_close(args[3], out)


def test_an_implementation_is_chosen_in_order_by_its_support_test():
    op = define("order_probe(Tensor x) -> Tensor", lambda x: x + 1, lambda x: torch.empty_like(x))
    x = torch.zeros(2)
    assert torch.ops.piecework.order_probe(x)[0] == 1
    op.implement("cpu", supports=lambda x: x.shape[0] == 2)(lambda x: x + 2)
    assert torch.ops.piecework.order_probe(x)[0] == 2
    assert torch.ops.piecework.order_probe(torch.zeros(3))[0] == 1
    assert op.resolve(("reference", "cpu"), x).name == "reference"
    with pytest.raises(UnsupportedOpError, match=r"piecework::order_probe.*asked: cpu"):
        op.resolve(("cpu",), torch.zeros(3))
    with pytest.raises(KeyError, match="rms_norm"):
        ops.get("no_such_op")
