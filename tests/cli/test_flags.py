"""Flags made from the configuration: all leaves, their other names, and what wins over what."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from piecework.bench.options import LatencyOptions, ServingOptions, ThroughputOptions
from piecework.cli.flags import add_config_flags, config_from_args, flag_name
from piecework.cli.generate import make_parser
from piecework.cli.parser import Parser, UserError
from piecework.cli.sampling_flags import sampling_changes
from piecework.config import EngineConfig, ServerConfig, leaves
from piecework.sampling import SamplingParams


def parser(*trees: type) -> Parser:
    made = Parser("test", "")
    add_config_flags(made, *trees)
    return made


def engine(*arguments: str) -> EngineConfig:
    return config_from_args(EngineConfig, parser(EngineConfig, ServerConfig).parse(arguments))


def test_every_leaf_has_its_flag_and_its_other_names() -> None:
    known = parser(EngineConfig, ServerConfig)._option_string_actions
    for tree in (EngineConfig, ServerConfig):
        for name, (leaf, _) in leaves(tree).items():
            assert {flag_name(name), *leaf.metadata["flags"]} <= set(known)


@pytest.mark.parametrize("options", [ServingOptions, LatencyOptions, ThroughputOptions])
def test_benchmark_options_do_not_clash_with_the_engines(options: type) -> None:
    parser(options, EngineConfig)  # argparse refuses a flag that is there twice
    assert not set(leaves(options)) & set(leaves(EngineConfig))


def test_nothing_given_is_the_default() -> None:
    assert engine() == EngineConfig()


@pytest.mark.parametrize(
    ("arguments", "section", "leaf", "value"),
    [
        (["--model", "m"], "load", "model", "m"),
        (["--model-dir", "m"], "load", "model", "m"),
        (["--max-model-len", "128"], "load", "max_model_len", 128),
        (["--max-seq-len", "128"], "load", "max_model_len", 128),
        (["--dtype", "float32"], "load", "dtype", "float32"),
        (["--block-size=8"], "cache", "page_size", 8),
        (["--kv-cache-memory", "512M"], "cache", "kv_cache_memory", 2**29),
        (["--kv-cache-memory", "1GiB"], "cache", "kv_cache_memory", 2**30),
        (["--seed", "-3"], "load", "seed", -3),
        (["--threads", "1"], "device", "threads", 1),
        (["--chunked-prefill-size", "7"], "scheduler", "chunk_size", 7),
    ],
)
def test_values_reach_their_leaf(arguments: list[str], section: str, leaf: str, value: Any) -> None:
    assert getattr(getattr(engine(*arguments), section), leaf) == value


def test_switches() -> None:
    assert engine("--profile").profile is True
    assert engine("--profile", "--no-profile").profile is False


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("cache: {page-size: 8, kv_cache_memory: 2M}\nprofile: true\nserver: {port: 1234}\n")
    config = engine("--config", str(file), "--page-size", "32", "--no-profile")
    assert (config.cache.page_size, config.cache.kv_cache_memory, config.profile) == (32, 2 * 2**20, False)
    assert config.scheduler == EngineConfig().scheduler
    args = parser(EngineConfig, ServerConfig).parse(["--config", str(file)])
    assert config_from_args(ServerConfig, args).port == 1234


def test_abbreviations_are_refused() -> None:
    with pytest.raises(UserError, match="--page"):
        engine("--page", "8")


def test_help_shows_defaults_and_choices() -> None:
    text = parser(EngineConfig, ServerConfig).format_help()
    for part in ("--page-size N, --block-size N", "(default: 16)", "(default: 8.0 MiB)", "bfloat16"):
        assert part in " ".join(text.split())


SAMPLING: dict[str, tuple[list[str], Any]] = {
    "temperature": (["--temperature", "0.5"], 0.5),
    "top_p": (["--top-p", "0.9"], 0.9),
    "top_k": (["--top-k", "-1"], -1),
    "min_p": (["--min-p", "0.1"], 0.1),
    "repetition_penalty": (["--repetition-penalty", "1.1"], 1.1),
    "presence_penalty": (["--presence-penalty", "-1"], -1.0),
    "frequency_penalty": (["--frequency-penalty", "0.5"], 0.5),
    "logit_bias": (["--logit-bias", '{"42": -100}'], {42: -100.0}),
    "seed": (["--seed", "5"], 5),
    "n": (["--n", "2"], 2),
    "max_tokens": (["--max-new-tokens", "9"], 9),
    "min_tokens": (["--min-tokens", "2"], 2),
    "stop": (["--stop", "a", "--stop", "b\n"], ("a", "b\n")),
    "stop_token_ids": (["--stop-token-ids", "2,7"], (2, 7)),
    "include_stop_str_in_output": (["--include-stop-str-in-output"], True),
    "ignore_eos": (["--ignore-eos"], True),
    "logprobs": (["--logprobs", "3"], 3),
    "prompt_logprobs": (["--prompt-logprobs", "0"], 0),
    "skip_special_tokens": (["--no-skip-special-tokens"], False),
}


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_every_sampling_field_has_a_flag(name: str) -> None:
    arguments, value = SAMPLING[name]
    changes = sampling_changes(make_parser().parse(["prompt", *arguments]))
    assert list(changes) == [name]
    assert getattr(SamplingParams().with_changes(**changes), name) == value


def test_no_sampling_flag_is_no_change() -> None:
    assert sampling_changes(make_parser().parse(["prompt"])) == {}


@pytest.mark.parametrize(
    "arguments", [["--stop-token-ids", "2,x"], ["--logit-bias", "[1]"], ["--logit-bias", '{"a": 1}']]
)
def test_unreadable_sampling_flags_are_refused(arguments: list[str]) -> None:
    with pytest.raises(UserError, match=arguments[0]):
        make_parser().parse(["prompt", *arguments])
