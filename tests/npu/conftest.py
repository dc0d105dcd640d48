"""Fixtures for tests of the device `npu`."""

from __future__ import annotations

from twin_npu import float32 as float32
from twin_npu import twin as twin
