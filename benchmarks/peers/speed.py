"""Runs Piecework and its peers by turns on the same prompts."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.check import OUTPUT_LEN, agreement
from benchmarks.peers.contenders import ENVIRONMENT, Case, Contender
from benchmarks.peers.install import python_of
from benchmarks.peers.others import Machine
from benchmarks.peers.process import EngineError, EngineProcess
from benchmarks.peers.protocol import Tokens

_WARM_LEN = 4  # tokens of the short runs that wake an engine's threads before a timed one


class Entrant:
    """A contender and its process; `error` says why it has no figures."""

    def __init__(self, contender: Contender, process: EngineProcess) -> None:
        self.contender = contender
        self.process = process
        self.facts: dict[str, Any] = {}
        self.agreement = ""
        self.error: str | None = None

    def ask(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """As `EngineProcess.ask`; where it fails, `error` is set and there is nothing in the answer."""
        try:
            return self.process.ask(operation, **arguments)
        except EngineError as error:
            self.error = str(error)
            print(f"{self.contender.name}: {error}", file=sys.stderr)
            return {}


def start(contender: Contender, environments: Path) -> EngineProcess:
    """Start the runner of a contender in its environment; what it prints is kept in `logs` beside that."""
    environment = ENVIRONMENT[contender.engine]
    python = sys.executable if environment is None else python_of(environments, environment)
    logs = environments / "logs"
    logs.mkdir(exist_ok=True)
    return EngineProcess(python, contender.engine, logs / f"{contender.name.replace(' ', '-')}.log")


def reference(contender: Contender, path: Path, environments: Path, prompts: Tokens, threads: int) -> Tokens:
    """The greedy tokens of `prompts` by a contender, each prompt alone."""
    with ExitStack() as stack:
        process = start(contender, environments)
        stack.callback(process.close)
        process.ask("load", model=str(path), threads=threads, **contender.settings)
        return alone(process, prompts)


def alone(process: EngineProcess, prompts: Tokens) -> Tokens:
    """Generate for each prompt by itself."""
    answers = [process.ask("generate", prompts=[ids], output_len=OUTPUT_LEN) for ids in prompts]
    return [answer["tokens"][0] for answer in answers]


def run_precision(
    contenders: Sequence[Contender],
    cases: Sequence[Case],
    paths: Mapping[str, Path],
    environments: Path,
    checked: tuple[Tokens, Tokens],
    threads: int,
    machine: Machine,
) -> Iterator[dict[str, Any]]:
    """Load all contenders, compare their tokens, and yield a row of figures for each case.

    Args:
        paths: the models' files by their keys.
        checked: prompts, and the reference's tokens for them.
        machine: tells when others pause.
    """
    with ExitStack() as stack:
        entrants = []
        for contender in contenders:  # they load at the same time
            entrant = Entrant(contender, start(contender, environments))
            stack.callback(entrant.process.close)
            model = str(paths[contender.model])
            entrant.process.send("load", model=model, threads=threads, **contender.settings)
            entrants.append(entrant)
        for entrant in entrants:
            try:
                entrant.facts = entrant.process.receive()
            except EngineError as error:
                entrant.error = f"not loaded: {error}"
        for entrant in entrants:
            if entrant.error is None:
                _check(entrant, *checked)
        first = next((e for e in entrants if e.contender.ours and e.error is None), None)
        if first is None:
            raise EngineError("; ".join(f"{e.contender.name}: {e.error}" for e in entrants if e.error))
        for case in cases:
            with machine.alone():
                row = _run_case(case, entrants, first, machine)
            yield row


def _check(entrant: Entrant, prompts: Tokens, wanted: Tokens) -> None:
    try:
        found = agreement(wanted, alone(entrant.process, prompts))
    except EngineError as error:
        entrant.error = str(error)
        return
    entrant.agreement = str(found)
    if not found.plausible:
        entrant.error = f"wrong tokens: {found.begun} of {found.prompts} prompts begin as in the reference"


def _run(case: Case, entrant: Entrant, prompts: Tokens) -> dict[str, Any]:
    """One timed run, after a short one that wakes the engine's threads."""
    entrant.ask("generate", prompts=[ids[:_WARM_LEN] for ids in prompts], output_len=2)
    if entrant.error is not None:
        return {}
    return entrant.ask("generate", prompts=prompts, output_len=case.output_len)


def _run_case(case: Case, entrants: Sequence[Entrant], first: Entrant, machine: Machine) -> dict[str, Any]:
    """Time one case. `first` reads the floor after every run; the order turns with every round."""
    rng = random.Random(0)
    vocabulary = first.facts["vocab_size"]
    rounds: dict[Entrant, list[tuple[float, float, float | None]]] = {entrant: [] for entrant in entrants}
    for number in range(-1, case.rounds):  # round -1 warms up
        prompts = [[rng.randrange(vocabulary) for _ in range(case.input_len)] for _ in range(case.batch)]
        for entrant in entrants if number % 2 == 0 else entrants[::-1]:
            if entrant.error is not None:
                continue
            if number < 0:
                entrant.ask("generate", prompts=prompts, output_len=2)
                continue
            run, share = machine.timed(entrant.process.pid, partial(_run, case, entrant, prompts))
            if not run:
                continue
            floor = first.process.ask("floor")
            counts = {len(tokens) for tokens in run["tokens"]}
            if counts != {case.output_len}:
                entrant.error = f"{sorted(counts)} tokens in place of {case.output_len}"
                continue
            rounds[entrant].append((case.speed(run["times"]), floor["bytes"] / floor["seconds"], share))
        print(f"{case.name}: round {number + 1} of {case.rounds}", file=sys.stderr)
    return {
        "case": case.name,
        "batch": case.batch,
        "input_len": case.input_len,
        "output_len": case.output_len,
        "engines": [
            {
                "name": entrant.contender.name,
                "ours": entrant.contender.ours,
                "version": entrant.facts.get("version"),
                "tokens_as_reference": entrant.agreement,
                "weight_bytes": entrant.facts.get("weight_bytes"),
                "speeds": [speed for speed, _, _ in rounds[entrant]],
                "floors": [floor for _, floor, _ in rounds[entrant]],
                "others": [share for _, _, share in rounds[entrant]],
                "error": entrant.error,
            }
            for entrant in entrants
        ],
    }
