"""The configuration tree: defaults, files, sections, refusals."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecework.config import EngineConfig, ServerConfig, Settings, build, leaves, read_file, select
from piecework.errors import ConfigError


def test_defaults_pass_their_own_checks() -> None:
    config = EngineConfig()
    assert config.load.model == "smollm2-135m"
    assert config.cache.page_size == 16
    assert EngineConfig.from_flat({}) == config


def test_the_tree_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        EngineConfig().cache.page_size = 32  # type: ignore[misc]


def test_leaf_names_are_unique_over_all_trees() -> None:
    engine, server = leaves(EngineConfig), leaves(ServerConfig)
    assert not set(engine) & set(server)
    assert set(leaves(Settings)) == set(engine) | set(server)


def test_every_leaf_has_a_help_text() -> None:
    assert [name for name, (leaf, _) in leaves(Settings).items() if not leaf.metadata["help"]] == []


def test_from_flat_reaches_every_section() -> None:
    config = EngineConfig.from_flat(
        {"model": "m", "page_size": 32, "chunk_size": 64, "threads": 1, "profile": True}
    )
    found = (config.load.model, config.cache.page_size, config.scheduler.chunk_size, config.device.threads)
    assert found == ("m", 32, 64, 1)
    assert config.profile is True


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"page_sise=1 .*known: .*page_size") as caught:
        EngineConfig.from_flat({"page_sise": 1})
    assert (caught.value.field, caught.value.value) == ("page_sise", 1)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("page_size", 0, "an integer of at least 1"),
        ("page_size", "16", "type int"),
        ("page_size", True, "type int"),
        ("page_size", 1.5, "type int"),
        ("dtype", "float8", "one of auto, float32"),
        ("profile", 1, "type bool"),
        ("model", None, None),
        ("max_model_len", -1, "an integer of at least 1"),
        ("kv_cache_memory", "12 parsecs", "not a size"),
        ("seed", -1, None),
        ("threads", None, None),
    ],
)
def test_values_are_checked(name: str, value: Any, allowed: str | None) -> None:
    if allowed is None:
        EngineConfig.from_flat({name: value})
        return
    with pytest.raises(ConfigError, match=allowed) as caught:
        EngineConfig.from_flat({name: value})
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("values", "fits"),
    [
        ({"port": 0}, True),
        ({"port": 65536}, False),
        ({"port": -1}, False),
        ({"drain_timeout": 0}, True),
        ({"drain_timeout": 1.5}, True),
        ({"drain_timeout": -0.5}, False),
        ({"drain_timeout": float("nan")}, False),
        ({"max_body_bytes": "2MiB"}, True),
    ],
)
def test_server_values_are_checked(values: dict[str, Any], fits: bool) -> None:
    if fits:
        build(ServerConfig, values)
        return
    with pytest.raises(ConfigError, match=next(iter(values))):
        build(ServerConfig, values)


@pytest.mark.parametrize("seconds", [1e7, 1e10, float("inf")])  # a thread can't wait for more than 9.2e9 s
def test_no_wait_is_longer_than_a_thread_can_wait(seconds: float) -> None:
    names = ("start_timeout", "compile_timeout", "step_timeout", "max_failover_seconds")
    for kind, name in ((ServerConfig, "drain_timeout"), *((EngineConfig, name) for name in names)):
        values = {name: seconds} | ({"device": "sim,cpu"} if name == "max_failover_seconds" else {})
        if seconds < 1e9:
            build(kind, values)
            continue
        with pytest.raises(ConfigError, match=f"{name}=.* at most 31536000"):
            build(kind, values)


def test_sizes_are_read_from_text() -> None:
    assert EngineConfig.from_flat({"kv_cache_memory": "512M"}).cache.kv_cache_memory == 512 * 2**20


def _write(folder: Path, text: str) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text)
    return path


def test_file_flat_and_in_sections(tmp_path: Path) -> None:
    path = _write(
        tmp_path,
        "model: other\ncache: {page-size: 8, kv_cache_memory: 1GiB}\ndevice: cpu\nserver: {port: 9}\nhost: h",
    )
    values = read_file(path)
    assert values == {
        "model": "other",
        "page_size": 8,
        "kv_cache_memory": "1GiB",
        "device": "cpu",
        "port": 9,
        "host": "h",
    }
    config = EngineConfig.from_file(path, {"page_size": 64})
    assert (config.load.model, config.cache.page_size) == ("other", 64)
    assert config.cache.kv_cache_memory == 2**30
    assert build(ServerConfig, select(ServerConfig, values)).port == 9


def test_device_may_be_a_section_too(tmp_path: Path) -> None:
    config = EngineConfig.from_file(_write(tmp_path, "device: {device: cpu, threads: 1}"))
    assert config.device.threads == 1


def test_threads_are_at_most_the_processors_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 2, 5}, raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    for name in ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"):
        monkeypatch.delenv(name, raising=False)
    assert EngineConfig.from_flat({"threads": 3}).device.threads == 3
    with pytest.raises(
        ConfigError, match=r"threads=4 is not allowed: an integer .* at most 3, the processors"
    ):
        EngineConfig.from_flat({"threads": 4})
    # OpenMP binds the thread that asks to one processor, and others to others.
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    assert EngineConfig.from_flat({"threads": 8}).device.threads == 8
    with pytest.raises(ConfigError, match="at most 8"):
        EngineConfig.from_flat({"threads": 9})


def test_off_is_a_word_where_it_is_a_choice(tmp_path: Path) -> None:
    config = EngineConfig.from_file(_write(tmp_path, "failover: off\nprefix_caching: off"))
    assert config.device.failover == "off" and config.cache.prefix_caching is False


def test_a_section_may_be_empty_but_holds_no_value(tmp_path: Path) -> None:
    assert EngineConfig.from_file(_write(tmp_path, "cache:\ndevice:")) == EngineConfig()
    with pytest.raises(ConfigError, match="cache=3 is not allowed: a mapping, since it is a section"):
        EngineConfig.from_file(_write(tmp_path, "cache: 3"))


def test_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert EngineConfig.from_file(_write(tmp_path, "")) == EngineConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("page_sise: 3", "page_sise=3 .*known: .*page_size"),
        ("cache: {port: 3}", "port=3 .*not a setting of CacheConfig"),
        ("page_size: 3\ncache: {page_size: 4}", "page_size=4 .*twice"),
        ("page_size: 3\npage_size: 4", "each key once; page_size stands twice"),
        ("cache: {page_size: 3, page_size: 4}", "each key once; page_size stands twice"),
        ("[" * 20_000, "a readable YAML file"),
        ("- a\n- b", "a mapping at the top"),
        ("a: [", "a readable YAML file"),
        ("cache: 3", "cache=3"),
        ("1: 2", "1"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_file(_write(tmp_path, text))


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        EngineConfig.from_file(tmp_path / "none.yaml")


@given(st.integers(min_value=1), st.integers(min_value=1))
def test_any_positive_size_is_kept(page_size: int, queue: int) -> None:
    config = EngineConfig.from_flat({"page_size": page_size, "max_queue": queue})
    assert (config.cache.page_size, config.scheduler.max_queue) == (page_size, queue)
