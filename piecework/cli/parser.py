"""The argument parser of all commands: one readable line for a mistake, and near names for a typing error."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import NoReturn

from piecework.errors import PieceworkError


class UserError(PieceworkError):
    """A mistake in how a command was called; the command line reports it and exits with 2."""


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises UserError, refuses abbreviations and suggests near flags."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(
            prog=f"piecework {command}".strip(),
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def error(self, message: str) -> NoReturn:
        """Raise UserError, where argparse would print its usage and end the process."""
        raise UserError(f"{message} ({self.prog} --help lists the flags)")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse flags and positionals in any order, and name the nearest known flag for each unknown one."""
        args, unknown = self.parse_known_intermixed_args(arguments)
        if unknown:
            self.error("unknown arguments: " + ", ".join(self._describe(text) for text in unknown))
        return args

    def _describe(self, text: str) -> str:
        flag = text.split("=", 1)[0]
        near = difflib.get_close_matches(flag, self._option_string_actions, n=1) if flag[:2] == "--" else []
        return f"{text} (did you mean {near[0]}?)" if near else text
