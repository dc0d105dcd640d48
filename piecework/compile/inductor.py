"""Pieces by torch's inductor: fused kernels, one compilation for all sizes, kept on disk.

The named ops' references are written out first, so that they fuse. What is compiled carries no guards;
instead the assumptions that torch made about sizes are looked at, and a piece that doesn't hold for one
token gets a second variant for it.
"""

from __future__ import annotations

import inspect
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from piecework.compile.base import CompileContext, CompileError, FunctionPiece, first_line, token_input
from piecework.compile.cache import PieceCache, StaleEntryError, content_key
from piecework.graph.fold import structure
from piecework.graph.lower import Inlined, inline
from piecework.graph.symbols import assumptions, symbolic_sizes

log = logging.getLogger("piecework.compile")

_FOLDER_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_ONE_TOKEN = "more than one token"
_FEW_TOKENS = 32
_FEW_THREADS = 4
_lock = threading.Lock()


class InductorCompiler:
    """See the module."""

    name = "inductor"
    # torch.fx and inductor keep global state while they trace, so two threads can't. Within a piece inductor
    # runs the C++ or Triton compiler for several kernels at once by itself.
    parallel = False

    def compile(self, piece: fx.GraphModule, context: CompileContext) -> FunctionPiece:
        """Compile for all sizes, and for one token by itself where that is needed."""
        try:
            return self._compile(piece, context)
        except CompileError:
            raise
        except Exception as error:
            raise CompileError(self.name, first_line(error)) from error

    def _compile(self, piece: fx.GraphModule, context: CompileContext) -> FunctionPiece:
        with _lock:
            return self._variants(piece, context)

    def _variants(self, piece: fx.GraphModule, context: CompileContext) -> FunctionPiece:
        place = token_input(piece)
        context.cached = context.cache_dir is not None  # until a variant isn't found
        made: list[tuple[int, Callable[..., Sequence[Tensor]]]] = []
        for variant in _choose_variants(context):
            function, failed = self._variant(piece, context, variant)
            if failed == [_ONE_TOKEN] and place is not None:
                log.info("a piece is compiled again, for one token (key %s)", context.key[:12])
                single, failed = self._variant(piece, context, replace(variant, tokens=1))
                made.append((1, single))
            if failed:
                raise CompileError(self.name, "it assumes of the number of tokens: " + "; ".join(failed))
            made.append((variant.high, function))
        if len(made) == 1 or place is None:
            return FunctionPiece(made[-1][1], self.name)
        return FunctionPiece(_by_size(place, made), self.name)

    def _variant(
        self, piece: fx.GraphModule, context: CompileContext, variant: _Variant
    ) -> tuple[Callable[..., Sequence[Tensor]], list[str]]:
        """Return the compiled function and what it wrongly assumes: nothing, _ONE_TOKEN, or more."""
        order = context.device.op_order
        inlined = inline(piece, order, tokens=variant.tokens, max_tokens=variant.high)
        cache, key = None, ""
        if context.cache_dir is not None:
            cache = PieceCache(context.cache_dir / "pieces")
            key = self.cache_key(inlined, context, variant)
            found = self._load(cache, key)
            if found is not None:
                context.counters.add("cache_hits")
                return found
            context.cached = False
        with _compile_folder(context.cache_dir):
            artifact = _compile(inlined, variant)
        failed = _failed(inlined)
        if cache is not None:
            cache.store(key, lambda path: artifact.save(path=str(path), format="binary"), {"failed": failed})
        return artifact, failed

    def cache_key(self, inlined: Inlined, context: CompileContext, variant: _Variant) -> str:
        """Hash what the compiled code depends on.

        The graph with the references written out (so a changed reference is noticed), the range of sizes,
        torch, the device, and on a CPU its instruction set and the number of threads, which the kernels
        have inside.
        """
        from torch._inductor import config

        return content_key(
            {
                "compiler": self.name,
                "graph": structure(inlined.graph_module.graph),
                "tokens": [variant.tokens, variant.high],
                "torch": [torch.__version__, torch.version.git_version],
                "device": _hardware(context.device.torch_device),
                "threads": variant.threads,
                "cpp_wrapper": config.cpp_wrapper,
            }
        )

    def _load(self, cache: PieceCache, key: str) -> tuple[Callable[..., Sequence[Tensor]], list[str]] | None:
        from torch._inductor.standalone_compile import CompiledArtifact

        try:
            found = cache.load(key)
            if found is None:
                return None
            path, notes = found
            try:
                with _compile_folder(cache.folder.parent):
                    return CompiledArtifact.load(path=str(path), format="binary"), list(notes["failed"])
            except Exception as error:
                raise StaleEntryError(path, first_line(error)) from error
        except StaleEntryError as error:
            log.warning("%s; the piece is compiled again", error)
            return None


@dataclass(frozen=True)
class _Variant:
    """What a piece is compiled for: up to `high` tokens, or `tokens` exactly; `threads` of its loops."""

    high: int
    threads: int | None = None
    tokens: int | None = None


def _choose_variants(context: CompileContext) -> list[_Variant]:
    """On a CPU, serial loops for few tokens, and for many where there are enough cores to matter.

    A kernel's loops are parallel at every size or at none. At few tokens starting threads costs more than
    the loop, and on a busy machine much more. With few cores serial loops cost 2% of a long prefill
    (matrix products are parallel in any case), which is less than a second compilation is worth.
    """
    if context.device.torch_device.type != "cpu":
        return [_Variant(context.max_tokens)]
    threads = torch.get_num_threads()
    if threads <= _FEW_THREADS or context.max_tokens <= _FEW_TOKENS:
        return [_Variant(context.max_tokens, threads=1)]
    return [_Variant(_FEW_TOKENS, threads=1), _Variant(context.max_tokens, threads=threads)]


def _compile(inlined: Inlined, variant: _Variant) -> Any:
    import torch._inductor

    inputs: list[Any] = list(inlined.inputs)
    patches = {} if variant.threads is None else {"cpp.threads": variant.threads}
    options: dict[str, Any] = {}
    # One function that can be saved whole. A torch that lacks it saves entries of its caches.
    if "aot" in inspect.signature(torch._inductor.standalone_compile).parameters:
        options["aot"] = True
    for node in inlined.graph_module.graph.nodes:
        if "val" in node.meta:
            node.meta["example_value"] = node.meta["val"]  # where standalone_compile looks for the mode
    with symbolic_sizes(), torch.inference_mode(False), torch.no_grad():
        return torch._inductor.standalone_compile(
            inlined.graph_module,
            inputs,
            dynamic_shapes="from_graph",
            options={"config_patches": patches},
            **options,
        )


def _failed(inlined: Inlined) -> list[str]:
    if not assumptions(inlined.mode):
        return []
    return assumptions(inlined.mode, low=2) or [_ONE_TOKEN]


def _by_size(
    place: tuple[int, int], variants: Sequence[tuple[int, Callable[..., Sequence[Tensor]]]]
) -> Callable[..., Sequence[Tensor]]:
    """Call the first variant that is made for at least as many tokens as there are."""
    position, dim = place
    *smaller, (_, largest) = variants

    def run(*inputs: Tensor) -> Sequence[Tensor]:
        tokens = inputs[position].shape[dim]
        for high, function in smaller:
            if tokens <= high:
                return function(*inputs)
        return largest(*inputs)

    return run


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
    if device.type == "cpu":
        return f"cpu {torch.backends.cpu.get_cpu_capability()}"
    return device.type


@contextmanager
def _compile_folder(cache_dir: Path | None) -> Iterator[None]:
    """Let inductor keep its sources and libraries beside our entries, unless the user said where.

    It reads the place from an environment variable, which it sets itself to its default. So the variable
    is changed while something compiles here, which is once at a time.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    given = os.environ.get(_FOLDER_VARIABLE)
    if cache_dir is None or given not in (None, default_cache_dir()):
        yield
        return
    os.environ[_FOLDER_VARIABLE] = str(cache_dir / "inductor")
    try:
        yield
    finally:
        if given is None:
            os.environ.pop(_FOLDER_VARIABLE, None)
        else:
            os.environ[_FOLDER_VARIABLE] = given
