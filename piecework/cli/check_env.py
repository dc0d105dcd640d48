"""`piecework check-env`: says in plain sentences whether this machine is ready."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from piecework.cli.environment import check_environment
from piecework.cli.parser import Parser

DESCRIPTION = """\
Check Python, torch, packages, processor, memory, compiler and model cache: one sentence each.
The exit code is 1 where one of them is a problem."""


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns 1 where there is a problem."""
    args = make_parser().parse(arguments)
    findings = check_environment(args.cache_dir)
    for finding in findings:
        print(json.dumps(asdict(finding)) if args.json else f"{finding.level:<8} {finding.text}")
    problems = sum(finding.level == "problem" for finding in findings)
    if not args.json:
        print(f"\n{problems} problem{'s' * (problems != 1)} found." if problems else "\nReady.")
    return int(problems > 0)


def make_parser() -> Parser:
    """Return the parser of the command."""
    parser = Parser("check-env", DESCRIPTION)
    parser.add_argument("--cache-dir", metavar="DIR", help="where models are kept")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    return parser
