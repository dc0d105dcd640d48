"""The kernel that finds each row's largest number, beside numpy's argmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from piecework.native import library
from piecework.ops.cpu.largest import largest_cpu, supports_largest

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 16), (2, 333), (9, 49157)])
def test_the_first_of_the_largest(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, size = shape
    x = (torch.randn(rows, size, generator=torch.Generator().manual_seed(size)) * 2).to(dtype)
    for special in (torch.nan, torch.inf, -torch.inf):
        for row in range(rows):
            y = x.clone()
            y[row, size * row // rows :: 5] = special
            y[0, :] = -torch.inf if special < 0 else y[0]
            best, index = largest_cpu(y)
            wanted = y.float().numpy().argmax(axis=-1)
            assert index.tolist() == wanted.tolist()
            found = y.float().numpy()[np.arange(rows), wanted]
            assert np.array_equal(best.numpy(), found, equal_nan=True)


def test_rows_may_have_gaps_but_no_holes() -> None:
    x = torch.randn(4, 40)
    assert supports_largest(x[:, 3:20]) and not supports_largest(x.t()) and not supports_largest(x[:, :0])
    assert largest_cpu(x[:, 3:20])[1].tolist() == x[:, 3:20].argmax(dim=-1).tolist()
    assert not supports_largest(x.double())
