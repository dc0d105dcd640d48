"""`python -m benchmarks.peers`: install the peers, make their models, time all of them beside Piecework.

What is installed and made stays in --folder, so that a second call only measures.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers import install, models, serving, speed, table
from benchmarks.peers.check import TEXTS
from benchmarks.peers.contenders import CASES, ENVIRONMENT, PRECISIONS, Contender
from benchmarks.peers.machine import commit, describe, file_name, sentence
from benchmarks.peers.others import Machine
from benchmarks.peers.protocol import Tokens
from benchmarks.peers.report import save
from piecework.cache import cache_root
from piecework.cli.flags import positive
from piecework.tables import table as text_table
from piecework.tokenizer.load import load_tokenizer
from piecework.weights.source import resolve

_REFERENCE = Contender("transformers", "float32", "float", {"dtype": "float32"})


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    show = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=show
    )
    parser.add_argument("--folder", type=Path, default=cache_root() / "peers", help="environments and models")
    parser.add_argument("--model", default="smollm2-135m", help="a GGUF file, or what stands for one")
    parser.add_argument(
        "--precisions", type=_names(PRECISIONS), default=list(PRECISIONS), help="with commas between them"
    )
    parser.add_argument("--cases", type=_names(CASES), default=list(CASES), help="what is timed")
    parser.add_argument(
        "--peers", type=_names(ENVIRONMENT), default=list(ENVIRONMENT), help="engines that run"
    )
    parser.add_argument("--threads", type=positive, default=describe()["cores"], help="of each engine")
    parser.add_argument("--only", choices=("install", "models", "speed", "serving"), help="one stage")
    parser.add_argument("--requests", type=positive, default=32, help="of the servers, 8 at a time")
    parser.add_argument(
        "--shape", type=positive, nargs=2, default=(128, 64), help="tokens of a request in and out"
    )
    parser.add_argument(
        "--patience", type=float, default=60.0, help="seconds to wait, for each precision, until others pause"
    )
    parser.add_argument("--lock", type=Path, help="a file that is locked while a case is timed")
    parser.add_argument("--pip-flags", default="", help="given to pip")
    parser.add_argument("--save", type=Path, help="write results here, such as benchmarks/results")
    return parser


def main() -> None:
    """Run the stages that are asked for."""
    args = make_parser().parse_args()
    engines = {*args.peers, "piecework"}
    needed = {ENVIRONMENT[engine] for engine in engines} - {None}
    install.install(args.folder, sorted(str(name) for name in needed), args.pip_flags.split())
    if args.only == "install":
        return
    chosen = {p: [c for c in PRECISIONS[p] if c.engine in engines] for p in args.precisions}
    keys = {"float", "q4_1.gguf"} | {c.model for contenders in chosen.values() for c in contenders}
    source = resolve(args.model)
    folder = args.folder / "models" / source.path.stem
    paths = models.make(folder, args.folder, args.model, sorted(keys))
    if args.only == "models":
        return
    machine, version = describe(), commit()
    report: dict[str, Any] = {
        "machine": machine,
        "model": source.path.name,
        "threads": args.threads,
        "rows": [],
        "servers": [],
    }
    if args.only in (None, "speed"):
        checked = _checked(folder, paths["float"], args.folder, args.threads)
        for precision, contenders in chosen.items():
            print(f"{precision}: {', '.join(c.name for c in contenders)}", file=sys.stderr)
            cases = [CASES[name] for name in args.cases]
            watch = Machine(args.patience, args.lock)
            for row in speed.run_precision(
                contenders, cases, paths, args.folder, checked, args.threads, watch
            ):
                report["rows"].append({"precision": precision, "commit": version, **row})
                _keep(report, args.save)
    if args.only in (None, "serving"):
        with Machine(0.0, args.lock).alone():
            report["servers"] = serving.run(
                paths, args.folder, args.threads, args.requests, tuple(args.shape)
            )
        _keep(report, args.save)
    _print(report)


def _keep(report: dict[str, Any], folder: Path | None) -> None:
    """Save what there is so far, where that is asked for."""
    if folder is not None:
        save(folder, file_name(report["machine"]), report)


def _print(report: dict[str, Any]) -> None:
    print(sentence(report["machine"]))
    if report["rows"]:
        print(text_table(table.ALL_HEAD, table.everything(report["rows"])), end="\n\n")
        print(text_table(table.SUMMARY_HEAD, table.summary(report["rows"])))
    if report["servers"]:
        print(text_table(serving.SERVING_HEAD, serving.lines(report["servers"])))


def _checked(folder: Path, path: Path, environments: Path, threads: int) -> tuple[Tokens, Tokens]:
    """The prompts of the check and the reference's tokens, which are kept beside the models."""
    kept = folder / "reference.json"
    tokenizer = load_tokenizer(resolve(str(path)))
    assert tokenizer is not None
    prompts = [tokenizer.encode(text) for text in TEXTS]
    found = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    if found.get("prompts") != prompts:
        tokens = speed.reference(_REFERENCE, path, environments, prompts, threads)
        found = {"prompts": prompts, "tokens": tokens}
        kept.write_text(json.dumps(found), encoding="utf-8")
    return prompts, found["tokens"]


def _names(known: Any) -> Any:
    def names(text: str) -> list[str]:
        chosen = [name.strip() for name in text.split(",")]
        if unknown := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(known)}")
        return chosen

    return names


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # engines that stand still must end, too
    main()
