"""The accelerator for tests, on CPU tensors."""

from piecework.devices.sim.device import SimDevice
from piecework.devices.sim.faults import Fault
from piecework.devices.sim.graph import SimGraph

__all__ = ["Fault", "SimDevice", "SimGraph"]
