"""A step as one call gives the bits of its pieces, over any batches; what can't be one call says why."""

from __future__ import annotations

import random
import sys
import threading
from dataclasses import replace

import pytest
import torch
from chain_rig import ChainRig, run_pieces
from native_models import SCHEMES, native_model, native_program, pairwise
from programs import random_model

from piecework.compile.chain import Chain
from piecework.compile.chain_link import NotChainedError, link_chain
from piecework.compile.native_piece import InputError
from piecework.devices import make_device
from piecework.errors import CaptureError, PieceworkError
from piecework.graph.program import HoleCall, Program
from piecework.kvcache import AttentionMetadata
from piecework.native import library
from piecework.ops.attention import paged_attention
from piecework.ops.cpu.kernels import KERNELS
from piecework.runner.chained import ChainedStep, make_chain

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")


def random_steps(rig: ChainRig, steps: int, seed: int) -> None:
    """Sequences begin, go on by a token or a part of their prompt, and end."""
    draw = random.Random(seed)
    alive: list[int] = []
    for number in range(steps):
        alive += [number * 10 + i for i in range(draw.randrange(3) if len(alive) < 5 else 0)]
        lengths = {s: draw.choice([1, 1, 1, 2, 7, 19]) for s in alive if draw.random() < 0.8}
        if lengths:
            rig.check(lengths, seed * 100 + number)
        for sequence in [s for s in alive if s in lengths and draw.random() < 0.2]:
            rig.finish(sequence)
            alive.remove(sequence)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_random_batches_give_the_same_bits(name: str, dtype: torch.dtype) -> None:
    random_steps(ChainRig(native_model(name, dtype)), 12, seed=1)


@pytest.mark.parametrize("scheme", SCHEMES[1:])
def test_quantised_models_too(scheme: str) -> None:
    random_steps(ChainRig(native_model("qwen2", torch.bfloat16, scheme)), 5, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "name", "dtype"), pairwise(["llama", "mistral", "qwen2", "qwen3"]))
def test_all_schemes_models_and_types(scheme: str, name: str, dtype: torch.dtype) -> None:
    random_steps(ChainRig(native_model(name, dtype, scheme)), 25, seed=3)


@pytest.fixture(scope="module")
def rig() -> ChainRig:
    return ChainRig(native_model("llama", torch.float32))


def test_rows_behind_the_last_sequence_are_the_same(rig: ChainRig) -> None:
    made = rig.batch({1: 3, 2: 1})
    pad = torch.zeros(3, dtype=torch.int64)
    inputs = [torch.cat((x, pad)) for x in (made.input_ids, made.positions)]
    slots = torch.cat((made.metadata.slots, pad.int()))
    found, expected = rig.both(inputs, replace(made.metadata, slots=slots))
    assert found.shape[0] == 7 and torch.equal(found, expected)
    rig.finish(1), rig.finish(2)


def test_no_tokens_and_too_many(rig: ChainRig) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    metadata = AttentionMetadata(none.int(), none.int()[:, None], torch.zeros(1).int(), none.int(), 0)
    found, expected = rig.both([none, none], metadata)
    assert found.shape == expected.shape and found.shape[0] == 0
    many = torch.zeros(rig.program.max_tokens + 1, dtype=torch.int64)
    for run in (rig.step, lambda *args: run_pieces(rig.model, rig.program, rig.caches[1], *args)):
        with pytest.raises(ValueError, match=r"65537 tokens; the program is made for 65536"):
            run([many, many], metadata)
        with pytest.raises(ValueError, match="takes 2 inputs"):
            run([many], metadata)


def test_inputs_in_another_form(rig: ChainRig) -> None:
    made = rig.batch({5: 6})
    ids, positions = made.input_ids, made.positions
    wide = torch.stack((ids, ids + 1), 1)[:, 0]
    long = {
        name: getattr(made.metadata, name).long()
        for name in ("slots", "page_table", "query_starts", "context_lengths")
    }
    found, expected = rig.both([wide, positions], replace(made.metadata, **long))
    assert wide.stride() == (2,) and torch.equal(found, expected)
    for bad in (positions[:5], positions.int(), positions[None]):
        with pytest.raises(InputError, match=r"input 1 of a piece must be int64 \[T\]"):
            rig.step([ids, bad], made.metadata)
    rig.finish(5)


def test_attention_reads_values_where_the_projection_put_them(rig: ChainRig) -> None:
    config = rig.model.config
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    place = KERNELS["paged_attention"].fields.index
    calls = link_chain(rig.program).calls
    assert [call.kernel for call in calls].count("split_qkv_rope") == config.num_layers
    found = [call.fields for call in calls if call.kernel == "paged_attention"]
    strides = [[fields[place(f"{name}_stride")].offset.constant for name in "kv"] for fields in found]
    assert strides == [[config.num_kv_heads * config.head_dim, width]] * config.num_layers


def test_a_result_stays_when_the_next_step_runs(rig: ChainRig) -> None:
    first = rig.check({7: 5})
    kept = first.clone()
    rig.check({7: 1, 8: 30}, seed=1)
    assert torch.equal(first, kept)
    rig.finish(7), rig.finish(8)


def test_a_cache_that_moves_is_followed() -> None:
    rig = ChainRig(native_model("llama", torch.float32))
    rig.check({3: 9})
    cache = rig.caches[0]
    old = cache.keys
    cache.keys, cache.values = (tuple(x.clone() for x in of) for of in (cache.keys, cache.values))
    for x in old:
        x.fill_(float("nan"))
    rig.check({3: 1})
    assert not torch.equal(cache.keys[0], old[0])
    fits = cache.values
    for odd, said in (
        (torch.Tensor.double, "not made for layer 0's KV cache, torch.float64"),
        (lambda x: x[:, :, :2], r"not made for layer 0's KV cache, .*\[200, 2, 2, 16\]"),
        (lambda x: torch.stack((x, x), -1)[..., 0], "layer 0's KV cache has gaps"),
    ):
        cache.values = tuple(map(odd, fits))
        with pytest.raises(PieceworkError, match=said):
            rig.check({3: 1})


def test_weights_that_move_are_noticed_in_debug_mode_and_harmless_without() -> None:
    rig = ChainRig(native_model("llama", torch.float32))
    made = rig.batch({0: 4})
    args = [made.input_ids, made.positions], made.metadata
    quick = ChainedStep(rig.chain, rig.caches[0])
    before = rig.step(*args)
    weight = next(w for w in rig.chain.plan.weights if w.dim() == 2)
    weight.mul_(2)  # in place, as a captured graph allows
    changed, expected = rig.both(*args)
    assert torch.equal(changed, expected) and not torch.equal(changed, before)
    weight.data = weight.clone()
    with pytest.raises(CaptureError, match="a weight or the KV cache moved"):
        rig.step(*args)
    assert torch.equal(quick(*args), changed)  # its memory is still there


def test_two_threads_run_steps_at_once(rig: ChainRig) -> None:
    equal: list[bool] = []
    batches = {n: rig.batch({n: n}) for n in (1, 70, 5, 130)}

    def run(number: int) -> None:
        made = batches[number]
        inputs = [made.input_ids, made.positions]
        expected = run_pieces(rig.model, rig.program, rig.caches[1], inputs, made.metadata)
        equal.extend(torch.equal(rig.step(inputs, made.metadata), expected) for _ in range(30))

    threads = [threading.Thread(target=run, args=(number,)) for number in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal == [True] * 120
    for number in batches:
        rig.finish(number)


def deep_step(layers: int) -> tuple[Chain, int]:
    """The chain of a model, and how many functions a step of it calls, of Python's and of others."""
    rig = ChainRig(random_model("llama", layers))
    step = ChainedStep(rig.chain, rig.caches[0])
    made = rig.batch({0: 3})
    inputs = [made.input_ids, made.positions]
    step(inputs, made.metadata)
    calls = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    step(inputs, made.metadata)
    sys.setprofile(None)
    return rig.chain, calls


def test_depth_costs_neither_python_nor_memory() -> None:
    (shallow, few), (deep, many) = deep_step(2), deep_step(9)
    assert few == many > 0
    assert len(deep.plan.calls) > 4 * len(shallow.plan.calls) - 20
    assert deep.plan.arena == shallow.plan.arena


def refusal(program: Program) -> str:
    with pytest.raises(NotChainedError) as caught:
        Chain(program)
    return caught.value.reason


def test_what_is_no_chain_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    model = native_model("llama", torch.float32)
    program = native_program(model, "native")
    assert refusal(native_program(model, "eager")) == "a piece is run by the compiler eager"
    other = native_program(model, "native", splitting_ops=("piecework::attention", "piecework::embedding"))
    assert refusal(other).startswith("piecework::embedding stands between pieces")
    assert refusal(Program.opaque(model, program.device, "too odd")) == "too odd"
    odd = random_model("llama", head_dim=12)
    assert refusal(native_program(odd, "native")) == "the kernel can't run its attention"
    chain = make_chain(program, program.device, True)
    assert isinstance(chain, Chain)
    assert make_chain(program, program.device, False) == "chain is false"
    assert make_chain(program, make_device("sim"), True) == "the device sim launches each piece"
    replaced = {**paged_attention.implementations}
    replaced["cpu"] = replace(replaced["cpu"], run=lambda *args: None)
    monkeypatch.setattr(paged_attention, "implementations", replaced)
    assert refusal(program) == "the kernel can't run its attention"


def test_pieces_that_disagree_are_no_chain() -> None:
    """Nothing makes such a program; but a wrong address would be read without a word."""
    program = native_program(native_model("llama", torch.float32), "native")
    steps = list(program.steps)
    hole = next(i for i, step in enumerate(steps) if isinstance(step, HoleCall))
    hidden = next(slot for slot in steps[0].outputs if slot not in [a.index for a in steps[hole].args[:4]])
    ids = program.input_slots[0]
    for args, said in (((ids,), "attention's q is no result"), ((hidden,), "attention's q is no result")):
        changed = replace(
            steps[hole], args=(replace(steps[hole].args[0], index=args[0]), *steps[hole].args[1:])
        )
        program.steps = (*steps[:hole], changed, *steps[hole + 1 :])
        assert said in refusal(program)
    program.steps = tuple(steps)
    last = steps[-1]
    program.steps = (*steps[:-1], replace(last, inputs=(ids, *last.inputs[1:])))
    assert refusal(program).startswith("a piece takes float32")
    program.steps = tuple(steps)
    program.output_slots = (ids,)
    assert refusal(program) == "its result is not one tensor that a piece makes"
