"""`piecework bench`: latency, throughput and start-up of the engine, load on a server, and kernels."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

from piecework.bench.options import (
    FailoverOptions,
    GrowthOptions,
    KernelOptions,
    LatencyOptions,
    RelayoutOptions,
    ServingOptions,
    StartupOptions,
    ThroughputOptions,
    WorkersOptions,
)
from piecework.cli.flags import COMPILATION, add_config_flags, config_from_args, given_settings
from piecework.cli.logs import show_logs
from piecework.cli.parser import Parser, UserError
from piecework.cli.progress import progress
from piecework.cli.remote import refuse_engine_settings
from piecework.collector import imports_stay
from piecework.compilation import read_object
from piecework.config import DeviceConfig, EngineConfig

if TYPE_CHECKING:
    from piecework.engine.service import Service

KINDS = {
    "serving": "load on an OpenAI-compatible server, another one (--base-url) or one started for the run",
    "latency": "one batch of a fixed shape, again and again, without a server",
    "throughput": "many prompts at once, without a server",
    "startup": "cold and warm starts, from a new process to the first token, stage by stage",
    "growth": "how a decode step grows with batch, context, layers and queue, part by part",
    "workers": "a step to another process and back, without a model, and processes that wait",
    "failover": "the pause of a batch whose device fails, with the next device cold and ready",
    "kernels": "each fused op against the ops that it replaces, on a device, without a model",
    "relayout": "keys and values that get another capacity in place, against memcpy and two copies",
}
OPTIONS = {
    "serving": ServingOptions,
    "latency": LatencyOptions,
    "throughput": ThroughputOptions,
    "startup": StartupOptions,
    "growth": GrowthOptions,
    "workers": WorkersOptions,
    "failover": FailoverOptions,
    "kernels": KernelOptions,
    "relayout": RelayoutOptions,
}


def run(arguments: Sequence[str]) -> int:
    """Run one benchmark; returns 1 where a request of `serving` failed, or numbers are wrong."""
    kind = arguments[0] if arguments else ""
    if kind in ("-h", "--help"):
        print("usage: piecework bench KIND [flags]\n\nkinds:")
        print("\n".join(f"  {name:<11} {text}" for name, text in KINDS.items()))
        return 0
    if kind not in KINDS:
        got = f"; got {kind!r}" if arguments else ""
        raise UserError(f"bench needs one of {', '.join(KINDS)}{got}")
    commands = {
        "serving": _serving,
        "latency": _latency,
        "throughput": _throughput,
        "startup": _startup,
        "growth": _growth,
        "workers": _workers,
        "failover": _failover,
        "kernels": _kernels,
        "relayout": _relayout,
    }
    return commands[kind](arguments[1:])


def make_parser(kind: str) -> Parser:
    """Return the parser of one benchmark."""
    parser = Parser(f"bench {kind}", f"Measure {KINDS[kind]}.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    trees = {"kernels": (DeviceConfig,), "relayout": (DeviceConfig,), "workers": ()}.get(
        kind, (EngineConfig,)
    )
    add_config_flags(parser, OPTIONS[kind], *trees)
    return parser


def _latency(arguments: Sequence[str]) -> int:
    from piecework.bench.latency import run_latency
    from piecework.bench.report import latency_block

    args = make_parser("latency").parse(arguments)
    options = config_from_args(LatencyOptions, args)
    beside = None
    if options.against is not None:  # refused before the first model is loaded
        given = _uncached(args)
        beside = EngineConfig.from_flat(changed_settings("against", options.against, given))

    def measured(service: Service, seed: int) -> dict[str, Any]:
        if beside is None:
            return run_latency(service, options, seed, done)
        with closing(type(service)(beside)) as other:
            return run_latency(service, options, seed, done, other)

    with progress("latency", options.num_iters + options.num_iters_warmup) as done:
        report = _offline(args, measured)
    print(json.dumps(report) if args.json else latency_block(report))
    return 0


def changed_settings(name: str, text: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings `given` with those of the JSON object `text`, the value of the flag `name`, over
    them; those of `compilation_config` one by one.
    """
    changes = dict(read_object(text, name))
    if COMPILATION in changes:
        changes[COMPILATION] = {
            **read_object(given.get(COMPILATION) or {}),
            **read_object(changes[COMPILATION]),
        }
    return {**given, **changes}


def _throughput(arguments: Sequence[str]) -> int:
    from piecework.bench.report import throughput_block
    from piecework.bench.throughput import run_throughput

    args = make_parser("throughput").parse(arguments)
    options = config_from_args(ThroughputOptions, args)
    with progress("prompts", options.num_prompts) as done:
        report = _offline(args, lambda service, seed: run_throughput(service, options, seed, done))
    print(json.dumps(report) if args.json else throughput_block(report))
    return 0


def _startup(arguments: Sequence[str]) -> int:
    from piecework.bench.startup import run_startup
    from piecework.bench.startup_report import startup_table

    args = make_parser("startup").parse(arguments)
    options = config_from_args(StartupOptions, args)
    show_logs(config_from_args(EngineConfig, args).log_level)
    starts = 2 * options.repeat * max(1, len(options.layer_counts()))
    with progress("starts", starts) as done:
        report = run_startup(given_settings(EngineConfig, args), options, done)
    print(json.dumps(report) if args.json else startup_table(report))
    return 0


def _growth(arguments: Sequence[str]) -> int:
    from piecework.bench.growth import count_rows, run_growth
    from piecework.bench.growth_report import growth_tables

    args = make_parser("growth").parse(arguments)
    options = config_from_args(GrowthOptions, args)
    show_logs(config_from_args(EngineConfig, args).log_level)
    with progress("rows", count_rows(options)) as done:
        report = run_growth(_uncached(args), options, done)
    print(json.dumps(report) if args.json else growth_tables(report))
    return 0


def _workers(arguments: Sequence[str]) -> int:
    from piecework.bench.workers import run_workers, workers_table

    args = make_parser("workers").parse(arguments)
    options = config_from_args(WorkersOptions, args)
    with progress("rows", len(options.sizes()) + 1) as done:
        report = run_workers(options, done)
    print(json.dumps(report) if args.json else workers_table(report))
    return 0


def _failover(arguments: Sequence[str]) -> int:
    with imports_stay():  # as in a server, where letting a model go doesn't look through them either
        from piecework.bench.failover import failover_table, run_failover

    args = make_parser("failover").parse(arguments)
    options = config_from_args(FailoverOptions, args)
    settings = _uncached(args)
    show_logs(settings.get("log_level", "error"))  # that a device fails is no news here
    with progress("cases", len(options.sizes()) * len(options.chosen())) as done:
        report = run_failover(settings, options, done)
    print(json.dumps(report) if args.json else failover_table(report))
    return int(any(case["outputs_equal"] < case["outputs_compared"] for case in report["cases"]))


def _kernels(arguments: Sequence[str]) -> int:
    from piecework.bench.kernels import chosen_ops, kernels_table, run_kernels

    args = make_parser("kernels").parse(arguments)
    options = config_from_args(KernelOptions, args)
    device = config_from_args(DeviceConfig, args)
    total = len(chosen_ops(options)) * len(options.hidden_sizes()) * len(options.token_counts())
    with progress("kernels", total) as done:
        report = run_kernels(device.device, device.threads, options, done)
    print(json.dumps(report) if args.json else kernels_table(report))
    return int(report["wrong"] > 0)


def _relayout(arguments: Sequence[str]) -> int:
    from piecework.bench.relayout import count_cases, relayout_table, run_relayout

    args = make_parser("relayout").parse(arguments)
    options = config_from_args(RelayoutOptions, args)
    device = config_from_args(DeviceConfig, args)
    with progress("cases", count_cases(options)) as done:
        report = run_relayout(device.device, device.threads, options, done)
    print(json.dumps(report) if args.json else relayout_table(report))
    return int(report["wrong"] > 0)


def _offline(args: argparse.Namespace, measure: Callable[[Any, int], dict[str, Any]]) -> dict[str, Any]:
    config = EngineConfig.from_flat(_uncached(args))
    show_logs(config.log_level)

    from piecework.engine.data_parallel import make_service

    with closing(make_service(config)) as service:
        return measure(service, config.load.seed)


def _uncached(args: argparse.Namespace) -> dict[str, Any]:
    """The given settings, without prefix caching unless they name it: what ran alone for a check of tokens
    would be known when it is timed.
    """
    return {"prefix_caching": False, **given_settings(EngineConfig, args)}


def _serving(arguments: Sequence[str]) -> int:
    from piecework.bench.own_server import own_server
    from piecework.bench.report import serving_block
    from piecework.bench.serving import make_requests, run_serving

    args = make_parser("serving").parse(arguments)
    options = config_from_args(ServingOptions, args)
    config = config_from_args(EngineConfig, args)
    show_logs(config.log_level)
    if options.base_url is not None:
        refuse_engine_settings(args)
    requests = make_requests(options, config.load.seed, _counter(config, args, options))
    with ExitStack() as stack:
        url, model = options.base_url, getattr(args, "model", None)
        if url is None:
            settings = given_settings(EngineConfig, args)
            url, model = stack.enter_context(own_server(settings, options.api_key)), None
        done = stack.enter_context(progress("requests", len(requests)))
        report = asyncio.run(run_serving(url, model, options, requests, config.load.seed, done))
    print(json.dumps(report) if args.json else serving_block(report))
    return int(report["failed"] > 0)


def _counter(config: EngineConfig, args: argparse.Namespace, options: ServingOptions) -> Callable[[str], int]:
    """How to count tokens: with the model's tokenizer where it is here, else by words."""
    from piecework.bench.datasets import words_tokens

    if options.base_url is not None and not hasattr(args, "tokenizer"):
        return words_tokens

    from piecework.tokenizer.load import load_tokenizer
    from piecework.weights.source import resolve

    load = config.load
    source = resolve(load.tokenizer or load.model, revision=load.revision, cache_dir=load.cache_dir)
    tokenizer = load_tokenizer(source, cache_dir=load.cache_dir)
    if tokenizer is None:
        return words_tokens
    return lambda text: len(tokenizer.encode(text))
