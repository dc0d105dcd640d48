"""Settings for all tests."""

from __future__ import annotations

import gc
import importlib
import logging
import os

import hypothesis
import pytest
import torch
from torch import Tensor

# Workers that run side by side share the cores; more threads than cores would wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for processes that tests start
    torch.set_num_threads(1)  # torch read the variable when it was imported

# A test gives the same verdict each time. `pytest --hypothesis-profile explore` looks for new examples.
hypothesis.settings.register_profile("repeat", derandomize=True)
hypothesis.settings.register_profile("explore", derandomize=False, print_blob=True)
hypothesis.settings.load_profile("repeat")


class TorchRandom:
    """torch's generator as hypothesis wants one, which seeds it before each example.

    That of the CPU alone: `torch.manual_seed` keeps a stack trace for each GPU library at every call.
    """

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def getstate(self) -> Tensor:
        return torch.default_generator.get_state()

    def setstate(self, state: Tensor) -> None:
        torch.default_generator.set_state(state)


TORCH_RANDOM = TorchRandom()  # hypothesis holds it weakly
hypothesis.register_random(TORCH_RANDOM)


def pytest_collection_finish() -> None:
    """What was imported stays, so the collector looks at none of it: it would at every `gc.collect`."""
    if "PYTEST_XDIST_WORKER" in os.environ:  # its tests come to these, one file alone may not
        for name in ("torch._dynamo", "transformers.models.auto.modeling_auto"):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _the_same_numbers_each_time() -> None:
    TORCH_RANDOM.seed(0)


@pytest.fixture(autouse=True)
def _the_logger_of_a_library() -> None:
    """A command that a test ran in this process prints the records itself, and hides them from others."""
    logger = logging.getLogger("piecework")
    logger.propagate = True
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
