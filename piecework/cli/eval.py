"""`piecework eval`: accuracy on GSM8K and perplexity, for the cost of a precision or a quantisation."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from piecework.cli.flags import add_config_flags, config_from_args
from piecework.cli.logs import show_logs
from piecework.cli.parser import Parser, UserError
from piecework.cli.progress import progress
from piecework.cli.remote import refuse_engine_settings
from piecework.config import EngineConfig
from piecework.eval.options import Gsm8kOptions, PerplexityOptions

if TYPE_CHECKING:
    from piecework.engine.service import Service

KINDS = {
    "gsm8k": "GSM8K's questions behind solved examples, in this process or on a server (--base-url)",
    "perplexity": "how well a text is predicted, token by token",
}
OPTIONS = {"gsm8k": Gsm8kOptions, "perplexity": PerplexityOptions}


def run(arguments: Sequence[str]) -> int:
    """Run one evaluation; returns 1 where a request failed."""
    kind = arguments[0] if arguments else ""
    if kind in ("-h", "--help"):
        print("usage: piecework eval KIND --data FILE [flags]\n\nkinds:")
        print("\n".join(f"  {name:<11} {text}" for name, text in KINDS.items()))
        return 0
    if kind not in KINDS:
        raise UserError(f"eval needs one of {', '.join(KINDS)}; got {kind!r}")
    return {"gsm8k": _gsm8k, "perplexity": _perplexity}[kind](arguments[1:])


def make_parser(kind: str) -> Parser:
    """Return the parser of one evaluation."""
    parser = Parser(f"eval {kind}", f"Evaluate {KINDS[kind]}.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_config_flags(parser, OPTIONS[kind], EngineConfig)
    return parser


def _gsm8k(arguments: Sequence[str]) -> int:
    from piecework.eval.gsm8k import read_questions
    from piecework.eval.report import gsm8k_block
    from piecework.eval.run_gsm8k import ask_server, ask_service

    args = make_parser("gsm8k").parse(arguments)
    options = config_from_args(Gsm8kOptions, args)
    questions = read_questions(options)
    if options.base_url is not None:
        refuse_engine_settings(args)
        with progress("questions", len(questions)) as done:
            report = ask_server(getattr(args, "model", None), questions, options, done)
    else:
        with closing(_service(args)) as service, progress("questions", len(questions)) as done:
            report = ask_service(service, questions, options, done)
    print(json.dumps(report) if args.json else gsm8k_block(report))
    return int(report["failed"] > 0)


def _perplexity(arguments: Sequence[str]) -> int:
    from piecework.eval.data import read_text
    from piecework.eval.perplexity import cut, run_perplexity
    from piecework.eval.report import perplexity_block

    args = make_parser("perplexity").parse(arguments)
    options = config_from_args(PerplexityOptions, args)
    text = read_text("data", options.data)
    with closing(_service(args)) as service:
        parts = cut(service, text, options)
        with progress("windows", len(parts.windows)) as done:
            report = run_perplexity(service, parts, done)
    print(json.dumps(report) if args.json else perplexity_block(report))
    return 0


def _service(args: argparse.Namespace) -> Service:
    config = config_from_args(EngineConfig, args)
    show_logs(config.log_level)

    from piecework.engine.data_parallel import make_service

    return make_service(config)
