"""`piecework quantize`: what it writes, what it refuses, and that nothing half-written stays."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from int8_checkpoints import loaded, logits
from reference import nrmse
from safetensors.torch import load_file
from tiny import save_tiny, tiny_model

from piecework import LLM
from piecework.cli.main import main
from piecework.layers.int8 import W8A8Linear
from piecework.quantization import offline
from piecework.quantization.files import Shards
from piecework.quantization.texts import read_texts
from piecework.tokenizer.load import load_tokenizer
from piecework.weights.safetensors import INDEX, SafetensorsCheckpoint
from piecework.weights.source import Source

QUANTISED = 4e-2  # as in test_int8_formats.py
TEXTS = ["the cat sat on the mat", "in the other room", "a hundred and one"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("float"), "qwen2", tokenizer=True)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    lines = [{"question": TEXTS[0], "answer": TEXTS[1]}, {"text": TEXTS[2]}]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


@pytest.mark.parametrize("scheme", ["w8a8-dynamic", "w8"])
def test_the_file_holds_what_is_made_on_load(model: Path, tmp_path: Path, scheme: str) -> None:
    out = tmp_path / "new" / "out"
    assert main(["quantize", str(model), str(out), "--scheme", scheme]) == 0
    on_load, from_file = loaded(model, scheme), loaded(out)
    expected = dict(on_load.named_parameters())
    found = dict(from_file.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        assert parameter.dtype == found[name].dtype and torch.equal(parameter, found[name]), name
    assert torch.equal(logits(on_load), logits(from_file))
    stored = load_file(out / "model.safetensors")
    wanted = "weight_packed" if scheme == "w8" else "weight"
    assert stored[f"model.layers.0.mlp.up_proj.{wanted}"].dtype == (
        torch.int32 if scheme == "w8" else torch.int8
    )
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert {"tokenizer.json", "tokenizer_config.json"} <= {path.name for path in out.iterdir()}
    assert all(path.stat().st_mode & 0o044 for path in out.iterdir())


@pytest.mark.parametrize("extra", [[], ["--asymmetric", "--percentile", "99"]], ids=str)
def test_static_scales_come_from_the_texts(
    model: Path, texts: Path, tmp_path: Path, extra: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    keep = ["--keep-dynamic", "*.1.mlp.down_proj", "--max-error", "0"]
    command = ["quantize", str(model), str(out), "--scheme", "w8a8-static", "--calibration", str(texts)]
    assert main([*command, *keep, *extra, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["dynamic"] == {"model.layers.1.mlp.down_proj": "asked for by *.1.mlp.down_proj"}
    assert len(told["linears"]["w8a8-static"]) == 11 and told["calibration_tokens"] > 30
    made = loaded(out)
    layers = {n: m for n, m in made.named_modules() if isinstance(m, W8A8Linear)}
    assert {n for n, m in layers.items() if not m.is_static} == set(told["dynamic"])
    offsets = [m for m in layers.values() if m.input_offset is not None]
    assert (len(offsets) > 0) == ("--asymmetric" in extra)
    assert nrmse(logits(made), logits(tiny_model("qwen2"))) < 2 * QUANTISED  # other tokens than calibrated
    if extra:
        return
    with LLM(str(out), dtype="float32", max_model_len=64, kv_cache_memory=2**24) as llm:
        (result,) = llm.generate("the cat", temperature=0.0, max_tokens=4, ignore_eos=True)
    assert result.finish_reason == "length"


def test_the_range_is_that_of_the_calibrated_inputs(model: Path, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["quantize", str(model), str(out), "--scheme", "w8a8-static", "--calibration", str(texts)]
    assert main([*command, "--max-error", "0"]) == 0
    tokenizer = load_tokenizer(Source("folder", model))
    samples = [tokenizer.encode(text) for text in read_texts(texts)]
    reference = tiny_model("qwen2")
    watched = reference.model.layers[0].self_attn.o_proj
    seen: list[float] = []
    watched.register_forward_pre_hook(lambda module, inputs: seen.append(float(inputs[0].abs().max())))
    for ids in samples:
        reference(torch.tensor([ids]))
    largest = max(seen)
    scale = load_file(out / "model.safetensors")["model.layers.0.self_attn.o_proj.input_scale"]
    assert float(scale) == pytest.approx(largest / 127, rel=1e-4)


def test_linears_that_lose_too_much_stay_dynamic_and_are_named(
    model: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["quantize", str(model), str(tmp_path / "out"), "--scheme", "w8a8-static"]
    assert main([*command, "--calibration", str(texts), "--max-error", "1e-6"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("  dynamic: model.layers.") == 12 and "would lose" in printed


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--scheme", "w8a8-static"], "calibration"),
        (["--scheme", "w8", "--calibration", "TEXTS"], "needs no calibration"),
        (["--scheme", "w8a8-static", "--calibration", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--scheme", "w8a8-static", "--calibration", "TEXTS", "--keep-dynamic", "*.foo"], "'*.foo'"),
        (["--scheme", "w8a8-static", "--calibration", "TEXTS", "--keep-dynamic", "re:("], "compiles"),
        (["--scheme", "w8a8-static", "--calibration", "TEXTS", "--percentile", "3"], "percentile=3.0"),
        (["--scheme", "w4"], "w8a8-dynamic"),
        (["--scheme", "w8", "--threads", "99999"], "threads=99999 is not allowed: an integer of at least 1"),
        (["--scheme", "w8", "--asymmetric"], "asymmetric=True is not allowed: only with w8a8-static"),
        (["--scheme", "w8", "--keep-dynamic", "*.foo"], "keep_dynamic=['*.foo'] is not allowed: only with"),
        (["--scheme", "w8a8-dynamic", "--percentile", "99"], "percentile=99.0 is not allowed: only with"),
        (["--scheme", "w8a8-dynamic", "--max-error", "0"], "max_error=None is not allowed: only with"),
        (["--scheme", "w8", "--samples", "3"], "samples=3 is not allowed: only with"),
        (["--scheme", "w8a8-dynamic", "--smooth", "0.5"], "smooth=0.5 is not allowed: only with"),
        (["--scheme", "w8a8-dynamic", "--calibration", "TEXTS", "--smooth", "2"], "smooth=2.0"),
    ],
)
def test_mistakes_are_named_and_nothing_stays(
    model: Path, texts: Path, tmp_path: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(texts) if flag == "TEXTS" else flag for flag in flags]
    assert main(["quantize", str(model), str(tmp_path / "out"), *given]) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_failure_in_the_middle_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(offline, "copy_beside", fail)
    assert main(["quantize", str(model), str(tmp_path / "out"), "--scheme", "w8"]) == 1
    assert "no space left" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_a_signal_to_end_leaves_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def ended(*args: object) -> None:
        seen.extend(tmp_path.iterdir())
        signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda *_: None)  # or a test that fails would end the run
    try:
        monkeypatch.setattr(offline, "copy_beside", ended)
        with pytest.raises(SystemExit) as caught:
            main(["quantize", str(model), str(tmp_path / "out"), "--scheme", "w8"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught.value.code == 128 + signal.SIGTERM
    assert len(seen) == 1 and list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_and_a_model_that_is_quantised_are_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["quantize", str(model), str(out), "--scheme", "w8"]) == 0
    before = {path: path.read_bytes() for path in out.iterdir()}
    assert main(["quantize", str(model), str(out), "--scheme", "w8"]) == 2
    assert "doesn't exist yet" in capsys.readouterr().err
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    assert main(["quantize", str(model), str(link), "--scheme", "w8"]) == 2
    assert "doesn't exist yet" in capsys.readouterr().err and link.is_symlink()
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    assert main(["quantize", str(out), str(tmp_path / "again"), "--scheme", "w8"]) == 2
    assert "compressed-tensors checkpoint of scheme w8" in capsys.readouterr().err


def test_large_models_are_written_in_shards(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    shards = Shards(tmp_path, limit=100)
    tensors = {f"t{i}": torch.full((10,), float(i)) for i in range(5)}
    for name, tensor in tensors.items():
        shards.add(name, tensor)
    shards.finish()
    assert (tmp_path / INDEX).exists() and (tmp_path / "model-00003-of-00003.safetensors").exists()
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert all(torch.equal(checkpoint.load(name), tensor) for name, tensor in tensors.items())
    checkpoint.close()


def test_a_line_of_json_may_hold_other_ends_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "a\u2028b\x85c"}\r\n{"text": "d"}\n', encoding="utf-8")
    assert read_texts(path) == ["a\u2028b\x85c", "d"]


def test_texts_are_read_from_lines_of_json_and_from_paragraphs(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "x"}]}\n\n{"prompt": "y"}\n')
    assert read_texts(path) == ["x", "y"]
    path = tmp_path / "a.txt"
    path.write_text("one\nline\n\n\ntwo\n")
    assert read_texts(path) == ["one\nline", "two"]
    for content in ('{"question": 3}', "[1]", "{", ""):
        bad = tmp_path / "bad.jsonl"
        bad.write_text(content)
        with pytest.raises(ValueError, match="calibration="):
            read_texts(bad)
