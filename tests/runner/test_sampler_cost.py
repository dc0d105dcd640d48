"""What sampling costs: calls don't grow with the rows, and greedy rows don't pay for others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sampling_states import peaked, state
from torch.utils._python_dispatch import TorchDispatchMode

from piecework.runner.sampler import SamplingState, sample

SIZE = 300
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"top_p": 0.9},
    {"top_k": 5, "min_p": 0.1},
    {},
    {"temperature": 0, "repetition_penalty": 1.3, "output": [1, 2]},
    {"presence_penalty": 0.5, "output": [3], "top_p": 0.8, "logprobs": 2},
]


class Calls(TorchDispatchMode):
    """Counts torch's operations, and the elements of the largest tensor that one made."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += 1
        known = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in known:
            self.largest = max(self.largest, result.numel())
        return result


def calls(logits: torch.Tensor, rows: list[SamplingState]) -> Calls:
    with Calls() as counted:
        sample(logits, rows)
    return counted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_many_calls_for_any_number_of_mixed_rows(dtype: torch.dtype) -> None:
    few, many = ([state(seed=i, **KINDS[i % len(KINDS)]) for i in range(count)] for count in (12, 30))
    logits = peaked(30, SIZE).to(dtype)
    assert calls(logits[:12], few).count == calls(logits, many).count > 20


@pytest.mark.parametrize("kind", KINDS[1:5], ids=str)
def test_greedy_rows_do_not_pay_for_one_that_is_not(kind: dict[str, Any]) -> None:
    rows = [state(temperature=0) for _ in range(31)] + [state(**kind)]
    made = calls(peaked(32, SIZE), rows).largest
    assert 0 < made <= 2 * SIZE, f"{made} elements made for one row of {SIZE}"
    plain = calls(peaked(31, SIZE), rows[:31])
    assert plain.largest <= 31, "greedy rows are copied"
