"""`bench startup`: starts in processes of their own, and what is made of their figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import save_tiny

from piecework.bench.options import StartupOptions
from piecework.bench.startup import comparison, empty_cache, middle, models, run_startup, start
from piecework.bench.startup_child import memory
from piecework.bench.startup_report import startup_table
from piecework.errors import ConfigError, ModelError

STAGES = (
    "interpreter",
    "import",
    "config",
    "tokenizer",
    "weights",
    "trace",
    "passes",
    "split",
    "compile",
    "capture",
    "cache",
    "rest",
    "first token",
)


def measured(layers: int, kind: str, compile_seconds: float, hits: int) -> dict[str, Any]:
    stages = dict.fromkeys(STAGES, 0.25) | {"trace": 0.1 * layers, "passes": 0.1, "compile": compile_seconds}
    body = {"compiles": 3, "cache_hits": hits, "compile_failures": 0}
    return {
        "model": f"tiny, {layers} layers",
        "start": kind,
        "stages": stages,
        "total": sum(stages.values()),
        "counters": {"body": body, "head": {**body, "compiles": 1}},
        "layers": layers,
        "device": "cpu",
        "dtype": "float32",
        "compiler": "inductor",
        "processor": 2.5,
        "memory": memory(2**20, 3 * 2**20, weights=2**20, kv_cache=2**21, kv_written=2**18),
    }


@pytest.mark.parametrize("layers", ["8,x", "0", "8,-2", "1.5"])
def test_layers_are_counts(layers: str) -> None:
    with pytest.raises(ConfigError, match=r"layers=.* is not allowed: positive integers such as 8,64"):
        StartupOptions(layers=layers)
    assert StartupOptions(layers="64, 8").layer_counts() == [8, 64]


def test_models_of_many_layers_have_the_shape_of_the_one_that_is_named(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "qwen2", "qwen2")
    made = list(models({"model": str(folder)}, StartupOptions(layers="2,5"), tmp_path))
    assert [m.name for m in made] == [f"{folder}, 2 layers", f"{folder}, 5 layers"]
    assert all(m.settings["load_format"] == "dummy" for m in made)
    config = json.loads((Path(made[1].settings["model"]) / "config.json").read_text())
    assert (config["architectures"], config["num_hidden_layers"]) == (["Qwen2ForCausalLM"], 5)
    assert "layer_types" not in config
    assert [m.settings for m in models({"model": "x"}, StartupOptions(), tmp_path)] == [{"model": "x"}]


def test_a_cold_start_has_an_empty_cache_and_keeps_the_other_settings(tmp_path: Path) -> None:
    stated = {"compilation_config": '{"compiler": "inductor", "cache_dir": "/kept"}', "dtype": "float32"}
    with empty_cache(stated, tmp_path) as own:
        place = Path(own["compilation_config"].pop("compile_cache_dir"))
        assert place.is_dir() and not list(place.iterdir())
        assert own == {"compilation_config": {"compiler": "inductor"}, "dtype": "float32"}
    assert not place.exists()


def test_the_middle_of_several_starts() -> None:
    found = middle([measured(8, "cold", seconds, 0) for seconds in (1.0, 9.0, 3.0)])
    assert found["stages"]["compile"] == 3.0 and found["stages"]["trace"] == 0.8


def test_depth_is_compared_on_cold_starts() -> None:
    starts = [measured(8, "cold", 10.0, 0), measured(8, "warm", 1.0, 4), measured(64, "cold", 11.0, 0)]
    found = comparison(starts)
    assert found["layers"] == [8, 64]
    assert found["compile_ratio"] == pytest.approx(1.1)
    assert found["ms_per_layer"] == pytest.approx((6.4 + 0.1) / 64 * 1e3)
    assert found["pipeline_ratio"] == pytest.approx((6.4 + 0.1 + 0.25 + 11) / (0.8 + 0.1 + 0.25 + 10))
    assert "compile_ratio" not in comparison(starts[:2])


def test_the_table_says_what_was_measured() -> None:
    starts = [measured(8, "cold", 10.0, 0), measured(8, "warm", 1.0, 4)]
    text = startup_table({"starts": starts, **comparison(starts)})
    lines = text.splitlines()
    assert lines[0] == "float32 on cpu, compiler inductor; seconds of each stage"
    assert [line.split("  ")[0] for line in lines[2 : 2 + len(STAGES)]] == list(STAGES)
    assert any(line.startswith("compile ") and line.endswith("1.000") for line in lines)
    assert "tiny, 8 layers, cold: 4 pieces compiled\n" in text
    assert "tiny, 8 layers, warm: 4 pieces compiled, 8 times from the compiler's cache\n" in text
    assert any(line.startswith("processor time") and line.endswith("2.500") for line in lines)
    assert (
        "warm: 2.0 MiB at the peak, beside 1.0 MiB of imports: 1.60x weights (1.0 MiB) "
        "and filled pages of the KV cache (256.0 KiB of 2.0 MiB)" in text
    )
    assert starts[0]["memory"]["ratio_reserved"] == pytest.approx(2 / 3)
    for counts in starts[1]["counters"].values():  # the others are then those of its making
        counts |= {"stored_programs": 1, "distinct": 2}
    text = startup_table({"starts": starts, **comparison(starts)})
    read = "tiny, 8 layers, warm: 2 programs of 4 pieces read from the disk, nothing of them compiled\n"
    assert read in text and "warm: 4 pieces" not in text
    unknown = [{**s, "memory": memory(None, None, weights=1, kv_cache=1, kv_written=1)} for s in starts]
    assert "imports" not in startup_table({"starts": unknown, **comparison(unknown)})


@pytest.mark.slow
def test_one_start(tmp_path: Path) -> None:
    (model,) = models({"dtype": "float32", "threads": 1}, StartupOptions(layers="2"), tmp_path)
    with empty_cache(model.settings, tmp_path) as own:
        found = start(own, prompt_len=3)
        assert tuple(found["stages"]) == STAGES
        assert sum(found["stages"].values()) == pytest.approx(found["total"], rel=1e-6)
        assert all(seconds >= 0 for seconds in found["stages"].values()), found["stages"]
        assert all(found["stages"][name] > 0 for name in ("interpreter", "import", "trace", "first token"))
        assert (found["layers"], found["compiler"], found["device"]) == (2, "native", "cpu")
        assert found["counters"]["body"]["pieces"] == 3
        assert found["memory"]["peak"] > found["memory"]["after_import"] > 2**20
        assert 0 < found["memory"]["kv_written"] < found["memory"]["kv_cache"]
        assert found["memory"]["ratio"] > found["memory"]["ratio_reserved"] > 0
        assert 0 < found["processor"] < 8 * found["total"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"dtype": "float32"}, 1.25),
        ({"dtype": "bfloat16", "quantization": "none"}, 1.35),
        ({"dtype": "bfloat16", "quantization": "w8a8-dynamic"}, 1.5),
        ({"dtype": "bfloat16", "quantization": "gguf"}, 1.6),
    ],
)
def test_a_warm_start_holds_little_beside_weights(settings: dict[str, Any], most: float) -> None:
    """Of the default model: about 45 MB are its tokenizer and code that was not read before."""
    start(settings, prompt_len=16)  # what may have to be built takes more
    found = start(settings, prompt_len=16)["memory"]
    assert 1 < found["ratio"] < most, found


def test_a_start_that_fails_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelError, match=r"did not start \(exit code 2\)"):
        start({"model": "/no/such/folder"}, prompt_len=1)
    assert "piecework: error: model='/no/such/folder' is not found" in capfd.readouterr().err


@pytest.mark.slow
def test_the_second_start_takes_its_pieces_from_the_cache(tmp_path: Path) -> None:
    """That as many compile at any depth is shown by tests/compile/test_inductor.py."""
    model = str(save_tiny(tmp_path / "llama", "llama"))
    settings = {"model": model, "dtype": "float32", "compilation_config": {"compiler": "inductor"}}
    cold, warm = run_startup(settings, StartupOptions(layers="4"))["starts"]
    assert (cold["start"], warm["start"]) == ("cold", "warm")
    found = {s["start"]: s["counters"]["body"] for s in (cold, warm)}
    assert {kind: counts["cache_hits"] for kind, counts in found.items()} == {"cold": 0, "warm": 3}
    assert found["cold"]["compiles"] == 3
