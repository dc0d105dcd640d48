"""Settings for all tests."""

from __future__ import annotations

import os

# Workers that run side by side share the cores; more threads than cores would wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
