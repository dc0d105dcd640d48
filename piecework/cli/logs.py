"""Where log records go: one line each on standard error, from the level of `--log-level` on."""

from __future__ import annotations

import logging
import sys


def show_logs(level: str) -> None:
    """Print the records of the package from `level` on; the root logger is left to others."""
    logger = logging.getLogger("piecework")
    logger.setLevel(level.upper())
    logger.propagate = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Line())
    logger.handlers[:] = [handler]


class _Line(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.levelno >= logging.WARNING:  # others' errors are quoted there, some over several lines
            message = " ".join(message.split())
        text = f"piecework: {record.levelname.lower()}: {message}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text
