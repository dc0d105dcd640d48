"""Flags of commands that may run against a server elsewhere."""

from __future__ import annotations

import argparse

from piecework.cli.compilation_flags import compilation_changes
from piecework.cli.flags import flag_name
from piecework.cli.parser import UserError
from piecework.config import EngineConfig, leaves

# What still means something to such a server: its model's name, how to count tokens, the seed.
_REMOTE = ("model", "tokenizer", "seed", "revision", "cache_dir", "log_level")


def refuse_engine_settings(args: argparse.Namespace) -> None:
    """Raise UserError where a flag was given that can only be set where the engine is started."""
    given = [name for name in leaves(EngineConfig) if hasattr(args, name) and name not in _REMOTE]
    given += compilation_changes(args)
    if given:
        flags = ", ".join(map(flag_name, given))
        raise UserError(f"{flags} cannot be set on the server at --base-url; give it to that server")
