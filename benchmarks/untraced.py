"""Pieces against the model as it is written, which runs as one hole: `python benchmarks/untraced.py --help`.

Prints what `piecework bench latency --against` prints; the other engine is the one whose model isn't traced.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import closing
from unittest.mock import patch

from piecework.bench.latency import run_latency
from piecework.bench.options import LatencyOptions
from piecework.bench.report import latency_block
from piecework.cli.flags import positive
from piecework.config import EngineConfig
from piecework.engine.service import Service
from piecework.graph.trace import TraceError


def untraced(settings: dict[str, object]) -> Service:
    """Return an engine that finds its model impossible to trace."""

    def refuse(*_: object, **__: object) -> None:
        raise TraceError("the benchmark asks for it")

    with tempfile.TemporaryDirectory() as empty, patch("piecework.graph.build.trace", refuse):
        return Service(
            EngineConfig.from_flat({**settings, "compilation_config": {"compile_cache_dir": empty}})
        )


def main() -> None:
    """Compare at one shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--compiler", default="auto")
    parser.add_argument("--batch-size", type=positive, default=1)
    parser.add_argument("--input-len", type=positive, default=16)
    parser.add_argument("--output-len", type=positive, default=32)
    parser.add_argument("--num-iters", type=positive, default=15)
    args = parser.parse_args()
    settings: dict[str, object] = {"model": args.model, "dtype": args.dtype}
    options = LatencyOptions(
        input_len=args.input_len,
        output_len=args.output_len,
        batch_size=args.batch_size,
        num_iters=args.num_iters,
    )
    made = EngineConfig.from_flat({**settings, "compilation_config": {"compiler": args.compiler}})
    with closing(Service(made)) as service, closing(untraced(settings)) as other:
        assert other.graph_counters()["body"]["pieces"] == 0
        print(latency_block(run_latency(service, options, 0, other=other)))


if __name__ == "__main__":
    main()
