"""The Triton kernels run on the GPU where there is one, else under Triton's interpreter.

That has to be on before triton is imported, and stays for the process. So these tests run in a process
that has TRITON_INTERPRET=1, which tests/ops/test_triton_interpreted.py starts, or where there is a GPU.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and DEVICE.type == "cpu":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter round to bfloat16 as hardware does."""
    if INTERPRETED:
        from triton.runtime import interpreter

        plain = interpreter._convert_float
        monkeypatch.setattr(interpreter, "_convert_float", lambda *args: _convert(plain, *args))


@pytest.fixture
def device() -> torch.device:
    """Where the tensors of a test of kernels live."""
    return DEVICE


def _convert(plain, value, source, target, *rest):
    """Round float32 to bfloat16 as hardware does.

    The interpreter drops the carry into the exponent (1.999 becomes 1), as of triton 3.7; see
    github.com/triton-lang/triton/pull/11897.
    """
    if (source.name, target.name) != ("fp32", "bf16"):
        return plain(value, source, target, *rest)
    wide = torch.from_numpy(np.array(value, copy=True).view(np.float32))
    return wide.bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(value.shape)
