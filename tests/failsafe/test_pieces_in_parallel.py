"""Programs of several fail-safe models: one that fails moves alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from failsafe_rig import Rig, trace

from piecework.failsafe.element import create

X = torch.arange(4.0)
PIECES = 12


def nth(i):
    """Twelve functions, no two of the same operations."""

    def fn(x):
        for _ in range(i % 3):
            x = x * 2
        for _ in range(i // 3):
            x = x.abs()
        return x + i

    return fn


GRAPHS = [trace(nth(i), X) for i in range(PIECES)]


def expected(x):
    for i in range(PIECES):
        x = x * 2 ** (i % 3) + i
    return x


def program(rig, threads=1):
    """Twelve models of different structure, each one's output bound as the next one's input."""

    def compile_piece(i):
        return create(rig.names, rig.factory(GRAPHS[i], f":{i}"))

    with ThreadPoolExecutor(threads) as pool:
        models = list(pool.map(compile_piece, range(PIECES)))
    requests = [model.create_request() for model in models]
    buffers = [X.clone(), *(torch.zeros(4) for _ in range(PIECES))]
    for i, request in enumerate(requests):
        request.set_input(0, buffers[i])
        request.set_output(0, buffers[i + 1])
    return models, requests, buffers


def run(requests, buffers):
    for request in requests:
        request.run()
    return buffers[-1]


@pytest.mark.parametrize("stage", ["compile", "create", "run"])
def test_one_piece_of_twelve_fails_and_moves_alone(stage):
    rig = Rig(faults={f"{stage}:sim:0:5"})
    models, requests, buffers = program(rig)
    assert run(requests, buffers).tolist() == expected(X).tolist()
    assert [m.active_device for m in models] == ["sim:0"] * 5 + ["sim:1"] + ["sim:0"] * 6
    assert [e for e in rig.events if e.startswith("compile:sim:1")] == ["compile:sim:1:5"]
    tried = [i for i in range(PIECES) if i != 5]
    runs = [e for e in rig.events if e.startswith("run:")]
    at_5 = ["run:sim:0:5", "run:sim:1:5"] if stage == "run" else ["run:sim:1:5"]
    assert runs == [f"run:sim:0:{i}" for i in tried[:5]] + at_5 + [f"run:sim:0:{i}" for i in tried[5:]]


def test_pieces_that_fail_together_move_each_on_its_own():
    rig = Rig(3, faults={"compile:sim:0:2", "create:sim:0:7", "run:sim:0:11", "compile:sim:1:11"})
    models, requests, buffers = program(rig)
    assert run(requests, buffers).tolist() == expected(X).tolist()
    where = [m.active_device for m in models]
    assert (where[2], where[7], where[11]) == ("sim:1", "sim:1", "sim:2")
    assert where.count("sim:0") == 9


def test_eight_threads_compile_twelve_pieces_with_failures_among_them():
    rig = Rig(3, faults={"compile:sim:0:1", "compile:sim:0:8", "compile:sim:1:8"})
    models, requests, buffers = program(rig, threads=8)
    assert sorted(e for e in rig.events if e.startswith("compile")) == sorted(
        [f"compile:sim:0:{i}" for i in range(PIECES)]
        + ["compile:sim:1:1", "compile:sim:1:8", "compile:sim:2:8"]
    )
    assert run(requests, buffers).tolist() == expected(X).tolist()
    assert (models[1].active_device, models[8].active_device) == ("sim:1", "sim:2")
