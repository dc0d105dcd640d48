"""`piecework quantize`: from a float model to a folder with an int8 checkpoint."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from piecework.cli.flags import positive
from piecework.cli.parser import Parser
from piecework.cli.pull import disk_size
from piecework.config import SCHEMES
from piecework.config.processors import check_threads
from piecework.units import format_size

if TYPE_CHECKING:
    from piecework.quantization.offline import Outcome

DTYPES = ("auto", "float32", "bfloat16", "float16")
DESCRIPTION = """\
Quantise the linears of a float model to int8 and write a compressed-tensors checkpoint, which
this engine and others read. The head, embeddings, norms, routers and experts stay float.

With texts (--calibration) the inputs of w8a8 linears are smoothed: outlying channels are moved
into weights, so that less is lost. w8a8-static needs them, to find the range of each linear's
input. A linear that would lose too much by one scale for all tokens stays dynamic; those are
listed."""


def run(arguments: Sequence[str]) -> int:
    """Run the command."""
    args = make_parser().parse(arguments)
    check_threads(args.threads)

    import torch

    from piecework.quantization.offline import quantise
    from piecework.quantization.options import Options
    from piecework.weights.source import resolve

    options = Options(
        scheme=args.scheme,
        calibration=args.calibration,
        samples=args.samples,
        max_tokens=args.max_tokens,
        smooth=args.smooth,
        percentile=args.percentile,
        asymmetric=args.asymmetric,
        keep_dynamic=tuple(args.keep_dynamic),
        max_error=args.max_error or None,
        dtype=None if args.dtype == "auto" else getattr(torch, args.dtype),
    )
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    source = resolve(args.model, revision=args.revision, cache_dir=args.cache_dir, progress=_tell)
    out = Path(args.out).expanduser()
    before = signal.signal(signal.SIGTERM, _end)
    try:
        outcome = quantise(source, out, options, cache_dir=args.cache_dir, say=_tell)
    finally:
        signal.signal(signal.SIGTERM, before)
    _print(out, disk_size(out), outcome, args.json)
    return 0


def make_parser() -> Parser:
    """Return the parser of the command."""
    parser = Parser("quantize", DESCRIPTION)
    parser.add_argument("model", metavar="MODEL", help="a folder, a .gguf file, a hub id, or an alias")
    parser.add_argument("out", metavar="OUT", help="the folder to make")
    parser.add_argument("--scheme", choices=SCHEMES, required=True, help="how linears are quantised")
    parser.add_argument("--calibration", metavar="FILE", help="texts for w8a8: .jsonl or text")
    parser.add_argument("--samples", type=positive, default=32, metavar="N", help="texts read (default: 32)")
    parser.add_argument(
        "--max-tokens", type=positive, default=512, metavar="N", help="tokens of a text (default: 512)"
    )
    parser.add_argument(
        "--smooth",
        type=float,
        default=0.75,
        metavar="A",
        help="how much of their channels' differences inputs leave to weights; 0: nothing (default: 0.75)",
    )
    parser.add_argument(
        "--percentile",
        type=float,
        default=100.0,
        metavar="P",
        help="share of the tokens whose range is held; what lies outside is clamped (default: 100)",
    )
    parser.add_argument("--asymmetric", action="store_true", help="static inputs have an offset")
    parser.add_argument(
        "--keep-dynamic",
        action="append",
        default=[],
        metavar="PATTERN",
        help="linears that stay dynamic, such as '*.down_proj' or 're:layers.0.'; repeatable",
    )
    parser.add_argument(
        "--max-error",
        type=float,
        default=0.1,
        metavar="X",
        help="loss of the mean token's input above which a linear stays dynamic; 0: none (default: 0.1)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights that stay float")
    parser.add_argument("--revision", metavar="REVISION", help="revision of a hub id")
    parser.add_argument("--cache-dir", metavar="DIR", help="where models are kept")
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _end(number: int, frame: object) -> NoReturn:
    """End as an exception does, so that what was half written goes away."""
    raise SystemExit(128 + number)


def _tell(line: str) -> None:
    print(f"piecework: {line}", file=sys.stderr, flush=True)


def _print(out: Path, size: int, outcome: Outcome, as_json: bool) -> None:
    if as_json:
        linears = {scheme: list(names) for scheme, names in outcome.linears.items()}
        result = {"path": str(out), "bytes": size, "linears": linears, "dynamic": dict(outcome.dynamic)}
        result |= {"errors": dict(outcome.errors), "calibration_tokens": outcome.tokens}
        result["smoothed"] = outcome.smoothed
        print(json.dumps(result))
        return
    counts = ", ".join(f"{len(names)} {scheme}" for scheme, names in outcome.linears.items())
    print(f"{out} ({format_size(size)}; {counts})")
    for name, reason in outcome.dynamic.items():
        print(f"  dynamic: {name}: {reason}")
