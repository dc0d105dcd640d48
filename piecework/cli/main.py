"""The `piecework` command: picks the command's module and turns errors into one line and an exit code.

Exit codes: 0 done, 1 a failure, 2 a mistake of the caller (flags, model, request), 130 Ctrl-C,
141 the reader of the output went away. Only the module of the chosen command is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from piecework.cli.parser import UserError
from piecework.errors import ConfigError, ModelError, PieceworkError, RequestError
from piecework.version import __version__

# name -> (module with `run(arguments) -> exit code`, one line for --help)
COMMANDS = {
    "generate": ("piecework.cli.generate", "generate text for one or more prompts"),
    "serve": ("piecework.cli.serve", "serve a model over HTTP, OpenAI-compatible"),
    "bench": ("piecework.cli.bench", "measure latency, throughput, start-up, kernels, or a running server"),
    "eval": ("piecework.cli.eval", "measure answers: accuracy on GSM8K, perplexity of a text"),
    "explain": ("piecework.cli.explain", "show what becomes of a model: passes, pieces, captures"),
    "quantize": (
        "piecework.cli.quantize",
        "write a model as int8, with calibration data or without",
    ),
    "pull": ("piecework.cli.pull", "fetch a model into the cache and print where it is"),
    "check-env": ("piecework.cli.check_env", "say in plain sentences whether this machine is ready"),
}
USER_ERRORS = (UserError, ConfigError, ModelError, RequestError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `arguments` are those after the program's name."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(given)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _silence_stdout()
        return 141
    except Exception as error:
        if "--debug" in given:
            raise
        _report(error)
        return 2 if isinstance(error, USER_ERRORS) else 1


def _dispatch(given: list[str]) -> int:
    name = given[0] if given else "--help"
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0 if given else 2
    if name in ("-V", "--version"):
        print(f"piecework {__version__}")
        return 0
    if name not in COMMANDS:
        raise UserError(f"unknown command {name!r}; the commands are {', '.join(COMMANDS)}")
    code = import_module(COMMANDS[name][0]).run(given[1:])
    sys.stdout.flush()
    return int(code)


def usage() -> str:
    """Return the text of `piecework --help`."""
    width = max(map(len, COMMANDS))
    lines = ["usage: piecework COMMAND [flags]", "", "commands:"]
    lines += [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    lines += [
        "",
        "`piecework COMMAND --help` lists a command's flags; `piecework --version` tells the version.",
    ]
    return "\n".join(lines)


def _silence_stdout() -> None:
    """Point stdout at nothing: Python flushes it once more at exit, which would print a traceback."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(error: Exception) -> None:
    if isinstance(error, PieceworkError):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error} (--debug shows where)"
    print("piecework: error: " + " ".join(text.split()), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
