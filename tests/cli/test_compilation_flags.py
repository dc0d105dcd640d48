"""Flags of single compilation settings, and what is refused of them, as a user sees it."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from cli_run import Run

from piecework.cli.flags import add_config_flags, config_from_args, flag_name, given_settings
from piecework.cli.parser import Parser
from piecework.compilation import CompilationConfig
from piecework.config import EngineConfig
from piecework.errors import ConfigError

GIVEN: dict[str, tuple[list[str], Any]] = {
    "compiler": (["--compiler", "dynamo:eager"], "dynamo:eager"),
    "decode_graph": (["--decode-graph", "full"], "full"),
    "prefill_graph": (["--prefill-graph", "piecewise"], "piecewise"),
    "decode_capture_sizes": (["--capture-sizes", "4,1, 2"], (1, 2, 4)),
    "prefill_capture_sizes": (["--prefill-capture-sizes", "16"], (16,)),
    "max_capture_size": (["--max-capture-size", "8"], 8),
    "max_decode_capture_size": (["--max-decode-capture-size", "8"], 8),
    "max_prefill_capture_size": (["--max-prefill-capture-size", "8"], 8),
    "decode_padding": (["--no-decode-padding"], False),
    "splitting_ops": (["--splitting-ops", "piecework::attention,a::b"], ("piecework::attention", "a::b")),
    "chain": (["--no-chain"], False),
    "passes": (["--passes", "dead_code"], ("dead_code",)),
    "disable_passes": (["--disable-passes", "a,b"], ("a", "b")),
    "verify_passes": (["--verify-passes"], True),
    "enable_debug_mode": (["--enable-debug-mode"], True),
    "compile_cache_dir": (["--compile-cache-dir", "/x"], "/x"),
    "strict": (["--strict"], True),
}


def config(*arguments: str) -> CompilationConfig:
    parser = Parser("test", "")
    add_config_flags(parser, EngineConfig)
    return config_from_args(EngineConfig, parser.parse(arguments)).compilation_config


@pytest.mark.parametrize("name", [field.name for field in fields(CompilationConfig)])
def test_every_setting_has_a_flag_that_sets_it_alone(name: str) -> None:
    arguments, value = GIVEN[name]
    assert config(*arguments) == CompilationConfig(**{name: value})
    assert flag_name(name).removeprefix("--") in " ".join(arguments) or name == "decode_capture_sizes"


@pytest.mark.parametrize(("name", "mode"), [("piecewise", "piecewise"), ("npugraph_fused", "full")])
def test_a_compiler_that_is_a_mode_means_eager_in_that_mode(name: str, mode: str) -> None:
    expected = CompilationConfig(compiler="eager", decode_graph=mode)
    assert config("--compiler", name) == config("--compiler", name, "--decode-graph", mode) == expected
    assert config("--compilation-config", json.dumps({"compiler": name})) == expected
    assert expected.with_changes(strict=True).decode_graph == mode
    with pytest.raises(ConfigError, match=f"compiler='{name}' is not allowed: with decode_graph={mode} or"):
        config("--compiler", name, "--decode-graph", "eager")


def test_a_flag_wins_over_the_same_key_and_leaves_the_others() -> None:
    text = '{"compiler": "inductor", "capture_sizes": ["bad"], "strict": true}'
    found = config("--compilation-config", text, "--capture-sizes", "3", "--compiler", "eager")
    assert found == CompilationConfig(compiler="eager", decode_capture_sizes=(3,), strict=True)
    with pytest.raises(ConfigError, match="bad"):
        config("--compilation-config", text, "--compiler", "eager")


def test_a_flag_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("compilation_config: {compiler: inductor, capture_sizes: [1, 2]}\n")
    found = config("--config", str(file), "--compiler", "eager")
    assert found == CompilationConfig(compiler="eager", decode_capture_sizes=(1, 2))


def test_what_was_given_can_be_handed_to_another_process() -> None:
    parser = Parser("test", "")
    add_config_flags(parser, EngineConfig)
    args = parser.parse(["--compilation-config", '{"strict": true}', "--capture-sizes", "1,2"])
    given = json.loads(json.dumps(given_settings(EngineConfig, args)))
    expected = CompilationConfig(strict=True, decode_capture_sizes=(1, 2))
    assert EngineConfig.from_flat(given).compilation_config == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decode_graph": "piecewise", "splitting_ops": []}, "splitting_ops=[] is not allowed: at least one"),
        ({"splitting_ops": []}, "splitting_ops=[] is not allowed: a list with piecework::attention"),
        (
            {"splitting_ops": ["piecework::rms_norm"]},
            "splitting_ops=['piecework::rms_norm'] is not allowed: a list with piecework::attention",
        ),
        (
            {"splitting_ops": ["piecework::attn"]},
            "splitting_ops='piecework::attn' is not allowed: ops that are registered with torch, such as "
            "piecework::attention, ",
        ),
        (
            {"compiler": "gcc"},
            "compiler='gcc' is not allowed: one of native, eager, inductor, openvino, dynamo:<backend>, "
            "which the device cpu has, or auto",
        ),
        ({"compiler": "dynamo:gcc"}, "compiler='dynamo:gcc' is not allowed: dynamo: and one of aot_eager, "),
        (
            {"decode_graph": "full"},
            "decode_graph='full' is not allowed: one of eager, which the device cpu has, or auto; it "
            "captures nothing",
        ),
        (
            {"prefill_graph": "piecewise"},
            "prefill_graph='piecewise' is not allowed: one of eager, which the device cpu has, or auto; it "
            "captures nothing",
        ),
        (
            {"compiler": "piecewise"},
            "decode_graph='piecewise' is not allowed: one of eager, which the device cpu has, or auto; it ",
        ),
        (
            {"prefill_graph": "full"},
            "prefill_graph='full' is not allowed: one of auto, eager, piecewise",
        ),
        (
            {"capture_sizes": [1, 0]},
            "decode_capture_sizes=[1, 0] is not allowed: a list of positive integers",
        ),
        ({"capture_sizes": [1.5]}, "decode_capture_sizes=[1.5] is not allowed: a list of positive integers"),
        (
            {"capture_sizes": [1, 65]},
            "decode_capture_sizes=[1, 65] is not allowed: sizes from 1 to max_num_seqs=64, and 65 is not",
        ),
        (
            {"prefill_capture_sizes": [8, 300]},
            "prefill_capture_sizes=[8, 300] is not allowed: sizes from 1 to max_model_len=256, and 300",
        ),
        (
            {"prefill_capture_sizes": [129], "budget": 128},
            "prefill_capture_sizes=[129] is not allowed: sizes from 1 to max_num_batched_tokens=128, and 129",
        ),
        (
            {"max_decode_capture_size": 65},
            "max_decode_capture_size=65 is not allowed: at most max_num_seqs=64",
        ),
        (
            {"max_prefill_capture_size": 300},
            "max_prefill_capture_size=300 is not allowed: at most max_model_len=256",
        ),
        (
            {"max_prefill_capture_size": 0},
            "max_prefill_capture_size=0 is not allowed: a positive integer",
        ),
        (
            {"capture_sizes": [1, 2, 4], "max_decode_capture_size": 2},
            "decode_capture_sizes=[1, 2, 4] is not allowed: sizes up to max_decode_capture_size=2",
        ),
        (
            {"prefill_capture_sizes": [16], "max_capture_size": 8},
            "prefill_capture_sizes=[16] is not allowed: sizes up to max_capture_size=8",
        ),
        (
            {"capture_sizes": [1], "strict": True},
            "decode_capture_sizes=[1] is not allowed: no sizes where decode runs eagerly",
        ),
        (
            {"splitting_ops": ["atb._npu_paged_attention", "atb._npu_reshape_and_cache"]},
            "splitting_ops='atb._npu_reshape_and_cache' is not allowed: ops that are registered with torch",
        ),
        (
            {"disable_passes": ["fuse_all"]},
            "disable_passes='fuse_all' is not allowed: names of raise_rms_norm, ",
        ),
        ({"passes": ["fuse_all"]}, "passes='fuse_all' is not allowed: names of raise_rms_norm, "),
        (
            {"graph": "full"},
            "compilation_config.graph='full' is not allowed: one of cache_dir, capture_sizes, ",
        ),
        (
            {"capture_sizes": [1], "decode_capture_sizes": [2]},
            "compilation_config.decode_capture_sizes=[2] is not allowed: only one of "
            "decode_capture_sizes and capture_sizes",
        ),
        (
            {"splitting_ops": ["piecework.attention"]},
            "splitting_ops='piecework.attention' is not allowed: ops that are registered with torch, such as",
        ),
        ({"splitting_ops": None}, "splitting_ops=None is not allowed: a list of names"),
        ({"disable_passes": None}, "disable_passes=None is not allowed: a list of names"),
        (
            {"passes": ["dead_code", "dead_code"]},
            "passes=['dead_code', 'dead_code'] is not allowed: names, each once",
        ),
        ({"compile_cache_dir": 5}, "compile_cache_dir=5 is not allowed: the path of a folder"),
        ({"cache_dir": False}, "compile_cache_dir=False is not allowed: the path of a folder"),
        ({"cache_dir": ""}, "compile_cache_dir='' is not allowed: the path of a folder"),
        ({"cache_dir": "a\0b"}, "compile_cache_dir='a\\x00b' is not allowed: the path of a folder"),
    ],
)
def test_what_cannot_work_is_refused(run: Run, tiny: Path, settings: dict[str, Any], message: str) -> None:
    budget = ["--max-num-batched-tokens", str(settings.pop("budget", 2048))]
    done = run("generate", "hi", "--model", str(tiny), "--compilation-config", json.dumps(settings), *budget)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"piecework: error: {message}")


def test_a_flag_in_the_file_is_refused_with_its_setting(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    for text, allowed in (
        ("compiler: eager", "below compilation_config, as compilation_config: {compiler: ...}"),
        ("capture-sizes: [1]", "below compilation_config, as compilation_config: {capture_sizes: ...}"),
        ("context-length: 64", "under the setting's own name, max_model_len"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError) as refused:
            config("--config", str(file))
        assert refused.value.allowed == allowed


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"strict": true, "strict": false}', "the key 'strict' stands twice, as True and False"),
        ('{"max_capture_size": 1' + "0" * 5000 + "}", "4300 digits"),
        ("[" * 100_000, "it is nested too deeply"),
    ],
    ids=["twice", "digits", "deep"],
)
def test_json_that_cannot_be_read_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=r"^compilation_config=.* is not allowed: a JSON object") as error:
        CompilationConfig.parse(text)
    assert reason in error.value.allowed


def test_a_vendors_attention_stands_for_ours_and_that_is_said(run: Run, tiny: Path) -> None:
    flags = ["--model", str(tiny), "--max-tokens", "3", "--dtype", "float32", "--max-model-len", "32"]
    plain = run("generate", "hi", *flags)
    text = json.dumps({"splitting_ops": ["atb._npu_paged_attention"]})
    sizes = ["--cuda-graph-bs", "1", "--piecewise-cuda-graph-tokens", "[8]", "--strict"]
    shown = [*flags, *sizes, "--device", "sim", "--log-level", "info"]
    done = run("generate", "hi", *shown, "--compilation-config", text)
    assert (done.code, done.out) == (0, plain.out), done.err
    assert "warning: splitting_ops: atb._npu_paged_attention stands for piecework::attention" in done.err
    assert "full [1], piecewise [8]" in done.err


def test_a_vendors_attention_may_be_written_in_any_way_and_counts_once() -> None:
    plain = "atb._npu_paged_attention"
    names = [plain, "atb::_npu_paged_attention", "torch.ops." + plain, f"torch.ops.{plain}.default"]
    names += ["piecework::attention", "aten::mm"]
    assert CompilationConfig(splitting_ops=names).cuts == ("piecework::attention", "aten::mm")


def test_the_config_of_the_issue_works_and_says_what_it_does(run: Run, tiny: Path) -> None:
    text = '{"splitting_ops": ["piecework::attention"], "capture_sizes": [1,2,4]}'
    plain = run("generate", "hi", "--model", str(tiny), "--max-tokens", "3", "--dtype", "float32")
    for device in ("cpu", "sim"):
        flags = ["--compilation-config", text, "--max-tokens", "3", "--dtype", "float32", "--device", device]
        flags += ["--max-model-len", "32", "--max-num-seqs", "4", "--max-num-batched-tokens", "32"]
        done = run("generate", "hi", "--model", str(tiny), *flags, "--log-level", "info")
        assert done.code == 0, done.err
        assert done.out == plain.out
        said = {
            "cpu": "warning: decode_capture_sizes=[1, 2, 4] captures nothing: decode runs eagerly",
            "sim": "full [1, 2, 4], piecewise",
        }
        assert said[device] in done.err
        if device == "cpu":
            assert "info: decode_graph=eager: the device cpu has no full graphs" in done.err
