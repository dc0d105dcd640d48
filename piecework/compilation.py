"""How programs are made: the settings behind `--compilation-config` and the flags beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from piecework.errors import ConfigError
from piecework.json_text import parse_unique

DEFAULT_SPLITTING_OPS = ("piecework::attention",)
DECODE_GRAPHS = ("auto", "eager", "piecewise", "full")
PREFILL_GRAPHS = ("auto", "eager", "piecewise")
OTHER_NAMES = {"capture_sizes": "decode_capture_sizes", "cache_dir": "compile_cache_dir"}
"""Short names of settings in JSON, in a file, and as flags."""
MODE_NAMES = {"piecewise": "piecewise", "npugraph_fused": "full"}
"""Compilers of SGLang's that are a decode mode here, with the compiler `eager`."""
OTHER_ATTENTION = (
    "atb._npu_paged_attention",
    "npu.npu_fused_infer_attention_score",
    "sglang.unified_attention_with_output",
    "vllm.unified_attention",
    "vllm.unified_attention_with_output",
)
"""Attention as other engines' graphs name it; here it is the one op `piecework::attention`."""
_SIZES = ("decode_capture_sizes", "prefill_capture_sizes")
_LARGEST = ("max_capture_size", "max_decode_capture_size", "max_prefill_capture_size")
_SWITCHES = ("decode_padding", "chain", "verify_passes", "enable_debug_mode", "strict")


@dataclass(frozen=True)
class CompilationConfig:
    """Compiler, graph modes, capture sizes and passes. JSON on the command line, a mapping in a file.

    Attributes:
        compiler: `native`, `eager`, `inductor`, `openvino`, `dynamo:<name>`, or `auto` for the device's own
            choice. `piecewise` and `npugraph_fused` are `eager` with the decode mode `piecewise` or `full`.
        decode_graph, prefill_graph: `eager`, `piecewise`, for decode also `full`, or `auto`.
        decode_capture_sizes: batch sizes to capture for decode; None takes the default sizes.
        prefill_capture_sizes: token counts to capture for prefill and mixed steps.
        max_capture_size: the largest of the default sizes, for decode and for prefill; a larger one that is
            given is refused.
        max_decode_capture_size, max_prefill_capture_size: the same for one phase; it wins there.
        decode_padding: a decode batch between two captured sizes is padded to the next. Without it, only
            batches of a captured size run as graphs, and every batch size is a default one.
        splitting_ops: the ops between the pieces; one of `OTHER_ATTENTION` stands for our attention. None,
            with a compiler `dynamo:<name>`, gives that one decode as a whole program for each capture size.
        chain: run a whole step as one call where all its pieces are native.
        passes: names of the passes to run, `[]` for none but `canonicalise`; None takes the default set.
            `disable_passes` are left out.
        verify_passes: run the graph before and after each pass, and refuse a rewrite that changes numbers.
        enable_debug_mode: check every input address at every replay.
        compile_cache_dir: where compiled pieces are kept; None takes a folder of the model cache.
        strict: make every fall-back, recompile and missed expectation an error.
    """

    is_leaf: ClassVar[bool] = True
    """The tree treats it as one value: its names are not flags of their own."""

    compiler: str = "auto"
    decode_graph: str = "auto"
    prefill_graph: str = "auto"
    decode_capture_sizes: tuple[int, ...] | None = None
    prefill_capture_sizes: tuple[int, ...] | None = None
    max_capture_size: int | None = None
    max_decode_capture_size: int | None = None
    max_prefill_capture_size: int | None = None
    decode_padding: bool = True
    splitting_ops: tuple[str, ...] = DEFAULT_SPLITTING_OPS
    chain: bool = True
    passes: tuple[str, ...] | None = None
    disable_passes: tuple[str, ...] = ()
    verify_passes: bool = False
    enable_debug_mode: bool = False
    compile_cache_dir: str | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        for name in _SIZES:
            self._freeze_sizes(name)
        for name in ("splitting_ops", "passes", "disable_passes"):
            self._freeze_names(name)
        _one_of("decode_graph", self.decode_graph, DECODE_GRAPHS)
        _one_of("prefill_graph", self.prefill_graph, PREFILL_GRAPHS)
        if not isinstance(self.compiler, str) or not self.compiler:
            raise ConfigError("compiler", self.compiler, "a compiler's name, or auto")
        if self.compiler in MODE_NAMES:
            self._take_mode(MODE_NAMES[self.compiler])
        if self.passes is not None and len(set(self.passes)) < len(self.passes):
            raise ConfigError("passes", list(self.passes), "names, each once")
        folder = self.compile_cache_dir
        if folder is not None and (not isinstance(folder, str) or not folder or "\0" in folder):
            raise ConfigError("compile_cache_dir", folder, "the path of a folder")
        for name in _LARGEST:
            if getattr(self, name) is not None and not _is_positive(getattr(self, name)):
                raise ConfigError(name, getattr(self, name), "a positive integer")
        for name in _SIZES:
            self._check_largest(name)
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(name, getattr(self, name), "true or false")
        if not self.splitting_ops and "piecewise" in (self.decode_graph, self.prefill_graph):
            raise ConfigError("splitting_ops", [], "at least one op where a graph mode is piecewise")

    @property
    def whole_program(self) -> bool:
        """Whether a vendor's compiler gets decode as one program, with attention inside."""
        return not self.splitting_ops and self.compiler.startswith("dynamo:")

    @classmethod
    def parse(cls, value: Any) -> CompilationConfig:
        """Read a config from JSON text or a mapping.

        Raises ConfigError for text that is no JSON object, for an unknown key, with the allowed ones, and
        for a setting that is given twice, also under both of its names.
        """
        if isinstance(value, CompilationConfig):
            return value
        chosen: dict[str, Any] = {}
        known = [f.name for f in fields(cls)]
        for key, setting in read_object(value).items():
            name = OTHER_NAMES.get(key, key)
            if name not in known:
                allowed = "one of " + ", ".join(sorted([*known, *OTHER_NAMES]))
                raise ConfigError(f"compilation_config.{key}", setting, allowed)
            if name in chosen:
                other = next(short for short, full in OTHER_NAMES.items() if full == name)
                raise ConfigError(f"compilation_config.{key}", setting, f"only one of {name} and {other}")
            chosen[name] = setting
        return cls(**chosen)

    @property
    def cuts(self) -> tuple[str, ...]:
        """The splitting ops as our graphs name them, each once."""
        return tuple(dict.fromkeys(own_op(name) for name in self.splitting_ops))

    def with_changes(self, **changes: Any) -> CompilationConfig:
        """Return a copy with some settings changed."""
        return replace(self, **changes)

    def _take_mode(self, mode: str) -> None:
        if self.decode_graph not in ("auto", mode):
            raise ConfigError(
                "compiler", self.compiler, f"with decode_graph={mode} or auto, not {self.decode_graph}"
            )
        object.__setattr__(self, "compiler", "eager")
        object.__setattr__(self, "decode_graph", mode)

    def _freeze_sizes(self, name: str) -> None:
        sizes = getattr(self, name)
        if sizes is None:
            return
        if not isinstance(sizes, list | tuple) or not sizes or not all(map(_is_positive, sizes)):
            raise ConfigError(name, sizes, "a list of positive integers")
        object.__setattr__(self, name, tuple(sorted(set(sizes))))

    def _check_largest(self, name: str) -> None:
        own = "max_" + name.removesuffix("s")
        sizes, field = getattr(self, name), own if getattr(self, own) is not None else "max_capture_size"
        largest = getattr(self, field)
        if sizes is not None and largest is not None and sizes[-1] > largest:
            raise ConfigError(name, list(sizes), f"sizes up to {field}={largest}")

    def _freeze_names(self, name: str) -> None:
        names = getattr(self, name)
        if names is None and name == "passes":
            return
        if not isinstance(names, list | tuple) or not all(isinstance(n, str) for n in names):
            raise ConfigError(name, names, "a list of names")
        object.__setattr__(self, name, tuple(names))


def own_op(name: str) -> str:
    """Return the name that our graphs have for a splitting op; another engine's attention is ours."""
    plain = name.removeprefix("torch.ops.").removesuffix(".default").replace("::", ".")
    return DEFAULT_SPLITTING_OPS[0] if plain in OTHER_ATTENTION else name


def read_object(value: Any, name: str = "compilation_config") -> Mapping[str, Any]:
    """Return a JSON object, as text or as a mapping, as a mapping; all else is a ConfigError of `name`."""
    if isinstance(value, str):
        try:
            value = parse_unique(value)
        except ValueError as error:
            raise ConfigError(name, value, f"a JSON object ({error})") from error
    if not isinstance(value, Mapping):
        raise ConfigError(name, value, "a JSON object")
    return value


def _is_positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(name, value, "one of " + ", ".join(allowed))
