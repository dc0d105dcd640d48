"""Flags for every sampling field of a request, named as the fields are."""

from __future__ import annotations

import argparse
from typing import Any

from piecework.json_text import parse_json

# field -> (type, metavar, help, other flags)
_NUMBERS: dict[str, tuple[type, str, str, tuple[str, ...]]] = {
    "temperature": (float, "X", "0 is greedy; higher is more random", ()),
    "top_p": (float, "X", "keep the likeliest tokens whose probabilities sum to this", ()),
    "top_k": (int, "N", "keep this many of the likeliest tokens; 0 or -1 keeps all", ()),
    "min_p": (float, "X", "drop tokens below this share of the likeliest one's probability", ()),
    "repetition_penalty": (float, "X", "above 1: tokens seen before become less likely", ()),
    "presence_penalty": (float, "X", "subtracted once from the logit of each generated token", ()),
    "frequency_penalty": (float, "X", "subtracted from a token's logit as often as it was generated", ()),
    "n": (int, "N", "samples for each prompt", ()),
    "max_tokens": (int, "N", "most tokens to generate for a prompt", ("--max-new-tokens",)),
    "min_tokens": (int, "N", "no end before this many tokens", ()),
    "logprobs": (int, "N", "with --json: log probabilities of this many tokens at each place", ()),
    "prompt_logprobs": (int, "N", "with --json: the same for the prompt", ()),
}
_SWITCHES = {
    "ignore_eos": "go on past the end token",
    "include_stop_str_in_output": "keep the stop string in the text",
    "skip_special_tokens": "leave special tokens out of the text",
}


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag a field of SamplingParams; those not given leave no attribute.

    `seed` has its flag from the engine's settings: there it is one number for weights and requests.
    """
    group = parser.add_argument_group("sampling")
    for name, (kind, metavar, text, others) in _NUMBERS.items():
        flags = ("--" + name.replace("_", "-"), *others)
        group.add_argument(
            *flags, dest=name, type=kind, metavar=metavar, help=text, default=argparse.SUPPRESS
        )
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="stop at this text", default=argparse.SUPPRESS
    )
    group.add_argument(
        "--stop-token-ids", type=_ids, metavar="ID,ID", help="stop at a token", default=argparse.SUPPRESS
    )
    group.add_argument(
        "--logit-bias",
        type=_bias,
        metavar="JSON",
        help="added to logits, such as '{\"42\": -100}'",
        default=argparse.SUPPRESS,
    )
    for name, text in _SWITCHES.items():
        flag = "--" + name.replace("_", "-")
        group.add_argument(
            flag, dest=name, action=argparse.BooleanOptionalAction, help=text, default=argparse.SUPPRESS
        )


def sampling_changes(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling fields that were given, by name; values are checked by SamplingParams."""
    names = [*_NUMBERS, *_SWITCHES, "stop", "stop_token_ids", "logit_bias", "seed"]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 2,32000") from error


def _bias(text: str) -> dict[int, float]:
    try:
        return {int(token): float(bias) for token, bias in parse_json(text).items()}
    except (ValueError, AttributeError, TypeError) as error:
        wanted = 'a JSON object from token id to number such as {"42": -100}'
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}") from error
