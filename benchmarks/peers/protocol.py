"""What the benchmark and an engine in a process of its own say to each other: a JSON object a line.

Only the standard library is imported here, since every engine's own environment runs it.

    -> {"op": "load", "model": PATH, "threads": 2, ...}   <- {"version": "1.0", "weight_bytes": 98000000}
    -> {"op": "generate", "prompts": [[1, 2]], "output_len": 3}
                              <- {"tokens": [[5, 6, 7]], "times": [[0.05, 0.07, 0.09]]}
    -> anything that fails                                   <- {"error": "ValueError: why"}
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TextIO

Tokens = list[list[int]]
Times = list[list[float]]
"""For each prompt, the seconds from the start of the call to each of its tokens."""


class Engine(Protocol):
    """A loaded model. Other operations are other methods that take and return what JSON can say."""

    facts: dict[str, Any]
    """What `load` answers: `version`, `weight_bytes` (that a decode step reads), and more."""

    def generate(self, prompts: Tokens, output_len: int) -> tuple[Tokens, Times]:
        """Continue all prompts (token ids) at once, greedily and past end tokens, by `output_len` tokens."""
        ...


Load = Callable[..., Engine]


def answer(lines: Iterable[str], out: TextIO, load: Load) -> None:
    """Answer each line of `lines` on `out`, until they end."""
    engine: Engine | None = None
    for line in lines:
        message = json.loads(line)
        operation = message.pop("op")
        try:
            if operation == "load":
                engine = load(**message)
                reply = engine.facts
            elif operation == "generate":
                assert engine is not None
                tokens, times = engine.generate(**message)
                reply = {"tokens": tokens, "times": times}
            else:
                reply = getattr(engine, operation)(**message)
        except Exception as error:  # the other side tells it, and goes on with other engines
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=out, flush=True)


def serve(load: Load) -> None:
    """Answer on stdout what stands on stdin. What libraries print goes to stderr."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    answer(sys.stdin, out, load)
