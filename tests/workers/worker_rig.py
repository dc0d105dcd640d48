"""Functions that tests submit as tasks, and workers that write down what they are asked."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from piecework.workers.tasks.functions import Function
from piecework.workers.tasks.inline import inline
from piecework.workers.tasks.recording import Record, RecordingEndpoint, recorded
from piecework.workers.tasks.tags import Tag
from piecework.workers.tasks.worker import Worker

IN, INOUT, OUT, INTO = Tag.INPUT, Tag.INOUT, Tag.OUTPUT, Tag.OUTPUT_EXISTING


def _double(x: Tensor, y: Tensor) -> None:
    torch.mul(x, 2, out=y)


def _add(x: Tensor, y: Tensor, amount: float) -> None:
    y.copy_(x + amount)


def _grow(x: Tensor, amount: float) -> None:
    x.add_(amount)


def _fail(x: Tensor, y: Tensor) -> None:
    raise ValueError(f"planned, after {tuple(x.shape)}")


DOUBLE = Function.of(_double, x=IN, y=OUT)
DOUBLE_INTO = Function.of(_double, x=IN, y=INTO)
ADD = Function.of(_add, x=IN, y=OUT)
ADD_INTO = Function.of(_add, x=IN, y=INTO)
GROW = Function.of(_grow, x=INOUT)
FAIL = Function.of(_fail, x=IN, y=OUT)
FAIL_INTO = Function.of(_fail, x=IN, y=INTO)
FUNCTIONS = (DOUBLE, DOUBLE_INTO, ADD, ADD_INTO, GROW, FAIL, FAIL_INTO)


class Gate:
    """A function that waits until the test opens it."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.entered = threading.Event()
        self.function = Function.of(self.wait, "gate", x=INOUT)

    def wait(self, x: Tensor) -> None:
        """Note that it runs, wait, and add one."""
        self.entered.set()
        assert self.opened.wait(30)
        x.add_(1)


def recording_worker(
    level: int, count: int = 1, functions: Sequence[Function] = FUNCTIONS, **settings: Any
) -> tuple[Worker, Record]:
    """A started worker over recorded inline children `w0`, `w1`, ..., which keep all that they are asked."""
    record = Record()
    names = {function.digest: function.name for function in functions}
    children = [recorded(inline(name=f"w{i}"), record, names) for i in range(count)]
    return Worker(level, children, functions=functions, **settings).start(), record


def endpoint_of(worker: Worker, number: int = 0) -> RecordingEndpoint:
    """The recording endpoint of a child."""
    endpoint = worker._roster.members[number].endpoint
    assert isinstance(endpoint, RecordingEndpoint)
    return endpoint


def numbers(count: int = 4, start: float = 1.0) -> Tensor:
    """A small float tensor [count]."""
    return torch.arange(start, start + count)
