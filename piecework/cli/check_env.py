"""`piecework check-env`: says in plain sentences whether this machine is ready, and whether a model fits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec

from piecework.cli.environment import Finding, check_environment
from piecework.cli.flags import add_config_flags, add_model_argument, config_from_args, model_from_args
from piecework.cli.model_fit import check_model
from piecework.cli.parser import Parser
from piecework.config import EngineConfig

CPU = "cpu"
DESCRIPTION = """\
Check Python, torch, packages, processor, memory, compiler, model cache and the devices of --device: one
sentence each.

With MODEL, say what it would take of memory with the settings that are given, before it is loaded: its
weights, the KV cache, whether both fit. Only headers are read, and nothing is fetched.
The exit code is 1 where there is a problem."""


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns 1 where there is a problem."""
    args = make_parser().parse(arguments)
    given = model_from_args(args)
    config = config_from_args(EngineConfig, args, **given)
    findings = check_environment(config.load.cache_dir)
    figures: dict[str, object] = {}
    about_devices = devices(config) if find_spec("torch") is not None else []
    findings += about_devices
    if any(finding.level == "problem" for finding in about_devices):
        return _print(findings, figures, args.json)
    if given or hasattr(args, "model"):
        if find_spec("torch") is None:
            findings.append(Finding("model", "problem", "Whether the model fits is known with torch only."))
        else:
            found, about = check_model(config)
            findings += about
            figures = {**asdict(found), "fits": found.fits}
    return _print(findings, figures, args.json)


def devices(config: EngineConfig) -> list[Finding]:
    """Say of each device that was asked for whether it is there; of the CPU, which always is, its kernels."""
    from piecework.engine.fit import kernels, probe

    findings = []
    for name in config.device.devices:
        try:
            if name == CPU:
                there, text = kernels(config)
                findings.append(Finding("kernels", "ok" if there else "note", f"{text}."))
                continue
            found = probe(name)
            text = f"The device {name} is there" + (f": {found}." if found else ".")
            findings.append(Finding("device", "ok", text))
        except Exception as error:  # of a driver, too
            findings.append(Finding("device", "problem", f"The device {name} can't be used: {error}."))
    return findings


def _print(findings: Sequence[Finding], figures: dict[str, object], as_json: bool) -> int:
    for finding in findings:
        line = asdict(finding) | ({"figures": figures} if finding.subject == "fit" else {})
        print(json.dumps(line) if as_json else f"{finding.level:<8} {finding.text}")
    problems = sum(finding.level == "problem" for finding in findings)
    if not as_json:
        print(f"\n{problems} problem{'s' * (problems != 1)} found." if problems else "\nReady.")
    return int(problems > 0)


def make_parser() -> Parser:
    """Return the parser of the command."""
    parser = Parser("check-env", DESCRIPTION)
    add_model_argument(parser, "a model to check")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    add_config_flags(parser, EngineConfig)
    return parser
