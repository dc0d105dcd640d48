"""`piecework check-env MODEL`: what a model takes, said before it is loaded, and what would fit instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_run import Run
from tiny import save_tiny

from piecework.devices import make_device
from piecework.llm import LLM
from piecework.native import reads_panels


def figures(run: Run, *arguments: str) -> dict[str, Any]:
    lines = run("check-env", *arguments, "--json").lines
    assert [line["subject"] for line in lines][-4:] == ["model", "weights", "kv_cache", "fit"]
    assert all(line["text"].endswith(".") for line in lines)
    return lines[-1]["figures"]


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--dtype", "bfloat16", "--quantization", "w8a8-dynamic"],
        ["--dtype", "bfloat16", "--quantization", "w8", "--lm-head", "w8"],
        ["--num-pages", "9"],
        ["--kv-cache-memory", "1M", "--max-model-len", "100", "--max-num-seqs", "2"],
    ],
)
def test_the_figures_are_those_of_the_engine(run: Run, tiny: Path, flags: list[str]) -> None:
    said = figures(run, str(tiny), *flags)
    settings = {
        flag[2:].replace("-", "_"): value for flag, value in zip(flags[::2], flags[1::2], strict=True)
    }
    whole = ("num_pages", "max_model_len", "max_num_seqs")
    with LLM(str(tiny), **{k: int(v) if k in whole else v for k, v in settings.items()}) as llm:
        assert said["asked"]["weight_bytes"] == llm.service.weight_bytes
        pages = llm.service.kv_bytes // said["asked"]["page_bytes"]
        assert said["asked"]["page_bytes"] * pages == llm.service.kv_bytes
        assert said["cache_tokens"] == (pages - 1) * said["page_size"]
        assert said["asked"]["dtype"] == llm.service.dtype
    assert said["fits"] and run("check-env", str(tiny), *flags).code == 0


def test_other_choices_are_sized_too(run: Run, tiny: Path) -> None:
    said = figures(run, str(tiny), "--dtype", "float32", "--no-repack")
    sizes = {(c["dtype"], c["quantization"]): c["weight_bytes"] for c in said["others"]}
    assert set(sizes) == {("bfloat16", "auto"), ("float32", "w8a8-dynamic")}
    assert sizes["bfloat16", "auto"] * 2 == said["asked"]["weight_bytes"] > sizes["float32", "w8a8-dynamic"]
    coded = figures(run, str(tiny), "--dtype", "bfloat16")["asked"]["weight_bytes"]
    assert coded < sizes["bfloat16", "auto"] if reads_panels() else coded == sizes["bfloat16", "auto"]
    done = run("check-env", str(tiny), "--dtype", "bfloat16")
    most = figures(run, str(tiny), "--dtype", "bfloat16", "--no-repack")["asked"]
    assert most["weight_bytes"] == most["most_bytes"] == sizes["bfloat16", "auto"]
    assert figures(run, str(tiny), "--dtype", "bfloat16")["asked"]["most_bytes"] == most["most_bytes"]
    assert ("; the most is without 12 bits" in done.out) == reads_panels()
    text = run("check-env", str(tiny), "--dtype", "float32").out
    assert "in float32; " in text and "in w8a8-dynamic beside float32" in text


def _too_large(folder: Path, times: float) -> Path:
    """A configuration whose weights are so many times the free memory in float32, in a head of many rows."""
    save_tiny(folder, "llama", tie_word_embeddings=True)
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    rows = int(times * make_device("cpu").free_memory() / 4 / config["hidden_size"])
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": rows}))
    return folder


def test_what_does_not_fit_is_told_what_would(run: Run, tmp_path: Path) -> None:
    folder = _too_large(tmp_path / "m", 1.4)
    done = run("check-env", str(folder), "--load-format", "dummy", "--dtype", "float32")
    assert done.code == 1
    (line,) = [line for line in done.out.splitlines() if line.startswith("problem")]
    assert "It does not fit: its weights take " in line
    assert line.endswith("What would fit: --dtype bfloat16.")


def test_what_never_fits_names_the_least(run: Run, tmp_path: Path) -> None:
    folder = _too_large(tmp_path / "m", 9)
    done = run("check-env", str(folder), "--load-format", "dummy", "--dtype", "bfloat16")
    assert done.code == 1 and "Nothing would: the least is " in done.out and "in bfloat16." in done.out


def test_a_cache_that_is_too_small_is_refused_as_by_the_engine(run: Run, tiny: Path) -> None:
    done = run("check-env", str(tiny), "--num-pages", "3", "--max-model-len", "100")
    assert done.code == 1
    assert "It does not fit: num_pages=3 is not allowed: at least 8 pages" in done.out
    assert "With more for the KV cache" in done.out


def test_nothing_is_fetched(run: Run, tmp_path: Path) -> None:
    for model in ("smollm2-135m", "pypi:some-package==2", "someone/something"):
        done = run("check-env", model, "--cache-dir", str(tmp_path))
        assert done.code == 2 and "is not on this machine: piecework pull fetches it" in done.err, done.err
    assert list(tmp_path.iterdir()) == []


def test_the_model_is_named_once(run: Run, tiny: Path) -> None:
    assert figures(run, "--model", str(tiny))["path"] == str(tiny)
    assert run("check-env", str(tiny), "--model", str(tiny)).code == 2
