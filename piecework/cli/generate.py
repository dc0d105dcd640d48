"""`piecework generate`: text for one or more prompts, streamed, in blocks, or as lines of JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from piecework.cli.flags import add_config_flags, config_from_args
from piecework.cli.json_lines import to_json
from piecework.cli.logs import show_logs
from piecework.cli.parser import Parser, UserError
from piecework.cli.progress import doing
from piecework.cli.prompts import Prompt, read_prompts
from piecework.cli.sampling_flags import add_sampling_flags, sampling_changes
from piecework.collector import imports_stay
from piecework.config import EngineConfig
from piecework.engine.offline import in_order, run_requests
from piecework.engine.outputs import Delta
from piecework.engine.result import Result, speeds
from piecework.sampling import SamplingParams

if TYPE_CHECKING:
    from piecework.engine.service import Service

DEFAULT_MAX_TOKENS = 256
DESCRIPTION = f"""\
Generate text for prompts given as arguments, in a file, or on standard input (one a line).

A sampling flag that is not given takes the model's own default (generation_config.json). A model that
states none is sampled greedily. Without --max-tokens, {DEFAULT_MAX_TOKENS} tokens are generated at most."""


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns 1 where a request ended with an error."""
    args = make_parser().parse(arguments)
    config = config_from_args(EngineConfig, args)
    changes = sampling_changes(args)
    SamplingParams().with_changes(**changes)  # a bad value is refused before the model is loaded
    if args.system is not None and not args.chat:
        raise UserError("--system needs --chat")
    prompts = read_prompts([*args.prompts, *args.prompt], args.prompt_file)
    show_logs(config.log_level)

    with doing(f"loading {config.load.model}"):
        with imports_stay():
            from piecework.engine.data_parallel import make_service

        loaded = make_service(config)
    with closing(loaded) as service:
        encoded = [p.encode(service.tokenizer, chat=args.chat, system=args.system) for p in prompts]
        params = [params_for(service, len(ids), changes) for ids in encoded]
        samples = [own.n for own in params]
        with closing(run_requests(service, encoded, params)) as deltas:
            if not args.json and samples == [1]:
                return _print_stream(delta for _, delta in deltas)
            failed = False
            for number, result in in_order(deltas, samples):
                failed = failed or result.finish_reason == "error"
                _print_result(prompts[number], number, result, service, args.json)
            return int(failed)


def make_parser() -> Parser:
    """Return the parser of the command."""
    parser = Parser("generate", DESCRIPTION)
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="a prompt")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; repeatable")
    parser.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="one prompt a line, or JSONL with prompt, messages or prompt_token_ids; - is standard input",
    )
    parser.add_argument("--chat", action="store_true", help="put each prompt through the chat template")
    parser.add_argument("--system", metavar="TEXT", help="with --chat: the system message")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line for each result")
    add_sampling_flags(parser)
    add_config_flags(parser, EngineConfig)
    return parser


def params_for(service: Service, prompt_tokens: int, changes: dict[str, Any]) -> SamplingParams:
    """Lay the given fields over the model's defaults; a model that states no sampling is greedy.

    The default length is cut to what the context leaves after the prompt; a given one is not.
    """
    defaults = service.default_params
    names = ("temperature", "top_p", "top_k", "min_p")
    states_sampling = any(getattr(defaults, name) != getattr(SamplingParams, name) for name in names)
    base: dict[str, Any] = {}
    if not states_sampling and not any(name in changes for name in names):
        base["temperature"] = 0.0
    if defaults.max_tokens is None:
        base["max_tokens"] = max(1, min(DEFAULT_MAX_TOKENS, service.max_model_len - prompt_tokens))
    return defaults.with_changes(**{**base, **changes})


def _print_stream(deltas: Iterable[Delta]) -> int:
    result = Result()
    for delta in deltas:
        result.add(delta)
        print(delta.text, end="", flush=True)
    print()
    if result.error:
        print(f"piecework: error: {result.error}", file=sys.stderr)
    else:
        print(summary(result), file=sys.stderr)
    return int(result.finish_reason == "error")


def _print_result(prompt: Prompt, number: int, result: Result, service: Service, as_json: bool) -> None:
    if as_json:
        device = str(service.health()["device"])
        line = to_json(result, prompt.given, device, service.tokenizer)
        print(json.dumps(line, ensure_ascii=False), flush=True)
        return
    sample = f", sample {result.index + 1}" if result.index else ""
    print(f"=== prompt {number + 1}{sample}: {_label(prompt)}")
    print(result.text.strip("\n") if not result.error else f"error: {result.error}")
    print(f"--- {summary(result)}\n", flush=True)


def _label(prompt: Prompt) -> str:
    given = prompt.given if isinstance(prompt.given, str) else json.dumps(prompt.given, ensure_ascii=False)
    line = " ".join(given.split())
    return line if len(line) <= 72 else line[:71] + "…"


def summary(result: Result) -> str:
    """Return one line of figures for a person: tokens, speeds, time to the first token, why it ended."""
    figures = speeds(result.usage, result.timing)
    parts = [f"{result.usage.completion_tokens} tokens"]
    if figures["decode_tok_s"] is not None:
        parts.append(f"{figures['decode_tok_s']:.1f} tok/s")
    if figures["prefill_tok_s"] is not None:
        parts.append(f"prompt of {result.usage.prompt_tokens} at {figures['prefill_tok_s']:.0f} tok/s")
    parts.append(f"first token after {(figures['ttft_ms'] or 0) / 1e3:.2f} s")
    parts.append(f"ended by {result.finish_reason}")
    return ", ".join(parts)
