"""`piecework explain`: what becomes of a model, as text, JSON, or one HTML page."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from piecework.cli.compilation_flags import compilation_changes
from piecework.cli.flags import add_config_flags, add_model_argument, config_from_args, model_from_args
from piecework.cli.logs import show_logs
from piecework.cli.parser import Parser, UserError
from piecework.cli.progress import doing
from piecework.config import EngineConfig

DESCRIPTION = """\
Show what becomes of a model on a device: its trace, what each pass did to it, the pieces and holes it
is cut into, who compiled each distinct piece, and what will be captured.

Only the model's configuration is read, no weights. Rewrites are verified on random inputs unless
--no-verify-passes is given."""


def run(arguments: Sequence[str]) -> int:
    """Run the command."""
    args = make_parser().parse(arguments)
    config = config_from_args(EngineConfig, args, **model_from_args(args))
    if "verify_passes" not in compilation_changes(args):
        verified = config.compilation_config.with_changes(verify_passes=True)
        config = replace(config, compilation_config=verified)
    show_logs(config.log_level)
    page = Path(args.html) if args.html is not None else None
    if page is not None:
        _check_page(page, args.html)

    from piecework.explain.explain import explain
    from piecework.explain.page import report_page
    from piecework.explain.text import report_text

    with doing("making the programs, and measuring what captures take"):
        report = explain(config)
    print(json.dumps(report.to_dict()) if args.json else report_text(report))
    if page is not None:  # after the report, which is not lost where the page can't be written
        try:
            page.write_text(report_page(report), encoding="utf-8")
        except OSError as error:
            raise UserError(f"--html {args.html}: cannot be written ({error})") from error
    return 0


def _check_page(page: Path, given: str) -> None:
    """Refuse what can't become a file before the work begins."""
    folder = page.absolute().parent
    if not given or page.is_dir():
        raise UserError(f"--html {given!r}: has to name a file, not a folder")
    if not folder.is_dir():
        raise UserError(f"--html {given}: there is no folder {folder}")
    if not os.access(page if page.exists() else folder, os.W_OK):
        raise UserError(f"--html {given}: cannot be written")


def make_parser() -> Parser:
    """Return the parser of the command."""
    parser = Parser("explain", DESCRIPTION)
    add_model_argument(parser, "what to explain")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--html", metavar="FILE", help="also write a page that draws the program")
    add_config_flags(parser, EngineConfig)
    return parser
