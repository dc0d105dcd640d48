"""The configuration: one frozen tree, from which the flags and the file format are made.

A value given on the command line wins over one in the file, which wins over the default.
"""

from piecework.config.devices import AuditConfig, DeviceConfig, WorkerConfig
from piecework.config.fields import build, check, leaves, select, setting
from piecework.config.load import DTYPES, SCHEMES, LoadConfig
from piecework.config.scheduling import CacheConfig, SchedulerConfig
from piecework.config.tree import EngineConfig, ServerConfig, Settings, read_file

__all__ = [
    "DTYPES",
    "SCHEMES",
    "AuditConfig",
    "CacheConfig",
    "DeviceConfig",
    "EngineConfig",
    "LoadConfig",
    "SchedulerConfig",
    "ServerConfig",
    "Settings",
    "WorkerConfig",
    "build",
    "check",
    "leaves",
    "read_file",
    "select",
    "setting",
]
