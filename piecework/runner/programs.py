"""A model's programs on a device, and the graphs that are captured of them."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from piecework import debug
from piecework.capture.buffers import StaticBuffers
from piecework.capture.head import HeadGraphs
from piecework.capture.measure import measure
from piecework.capture.options import CaptureOptions
from piecework.capture.plan import CapturePlan, Cost
from piecework.capture.runner import GraphRunner
from piecework.compilation import DEFAULT_SPLITTING_OPS
from piecework.compile.base import CompileContext, Compiler
from piecework.compile.chain import Chain
from piecework.compile.registry import make_compiler
from piecework.config import EngineConfig
from piecework.devices import Device
from piecework.errors import ConfigError
from piecework.graph.counters import Counters
from piecework.graph.program import Program
from piecework.graph.stored import ProgramStore, signature, storable, tensors_of
from piecework.kvcache import LayerShape, PagedKVCache, StaticKVCache, pages_for
from piecework.models.decoder import CausalLM
from piecework.profile import Profile
from piecework.runner.attention import PagedAttention
from piecework.runner.chained import ChainedStep, make_chain
from piecework.runner.placing import check_placed
from piecework.runner.ranks import Ranks
from piecework.runner.recipe import HeadPasses, Recipe

if TYPE_CHECKING:
    from piecework.runner.static import StaticSteps
    from piecework.runner.whole import WholeDecode

log = logging.getLogger("piecework.capture")

# Graphs get at most this share of the memory that is free beside the weights; the KV cache has the rest.
_GRAPH_SHARE = 0.5


@dataclass
class Programs:
    """Body and head of a model as programs, what to capture of them, and what that costs.

    `chain` is the body as one call, or why it can't be that. `compiler` is that of whole programs.
    """

    model: CausalLM
    body: Program
    head: Program
    device: Device
    options: CaptureOptions
    buffers: StaticBuffers
    counters: Counters
    head_counters: Counters
    config: EngineConfig
    chain: Chain | str
    compiler: Compiler | None = None
    cost: Cost | None = None
    plan: CapturePlan | None = None

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the device that captures will take."""
        return self.plan.bytes or 0 if self.plan is not None else 0

    def graphs(self, cache: PagedKVCache | StaticKVCache) -> GraphRunner | StaticSteps:
        """Return a runner of these programs over `cache`; nothing is captured yet."""
        if isinstance(cache, StaticKVCache):
            return self._static(cache)
        return self.over_pages(cache)

    def _static(self, cache: StaticKVCache) -> StaticSteps:
        from piecework.runner.static import StaticSteps  # it needs the tracer

        assert self.compiler is not None, "it compiles the static programs"
        head = HeadGraphs(self.head, self.device, None, self.head_counters, debug=False)
        context = CompileContext(self.device, counters=self.counters)
        return StaticSteps(self.body, head, self.compiler, context, self.model.attention_specs, cache)

    def over_pages(self, cache: PagedKVCache) -> GraphRunner:
        """Return a runner over a paged cache; see `graphs`."""
        settings = self.config.compilation_config
        return GraphRunner(
            self.body,
            self.head,
            self.device,
            self.options,
            self.buffers,
            PagedAttention(self.model.attention_specs, cache, self.device.op_order),
            counters=self.counters,
            head_counters=self.head_counters,
            watched=cache.tensors,
            chained=self._chained(cache),
            whole=self._whole(cache),
            debug=settings.enable_debug_mode,
            strict=settings.strict,
        )

    def _whole(self, cache: PagedKVCache) -> WholeDecode | None:
        if self.compiler is None:
            return None
        # It needs the tracer, which a start from the disk shall not import.
        from piecework.runner.whole import WholeDecode

        context = CompileContext(self.device, counters=self.counters)
        sizes = self.options.whole_sizes
        return WholeDecode(self.body, self.compiler, sizes, cache, self.buffers, context)

    def _chained(self, cache: PagedKVCache) -> ChainedStep | None:
        if isinstance(self.chain, str):
            return None
        return ChainedStep(self.chain, cache, debug=self.config.compilation_config.enable_debug_mode)


def make_programs(
    model: CausalLM,
    recipe: Recipe,
    config: EngineConfig,
    device: Device,
    profile: Profile,
    cache_dir: Path,
    max_len: int,
    *,
    stored: bool = True,
    ranks: Ranks | None = None,
) -> Programs:
    """Build both programs or take them from the disk, and plan captures from what the device has room for.

    Args:
        recipe: what `config` came down to.
        cache_dir: where programs and compiled pieces are kept.
        max_len: the longest context, in tokens.
        stored: a program from the disk will do; it has no graphs and no report of its passes to look at.
        ranks: the group that captures the same sizes, where this is a rank's part of the model.

    Raises:
        TraceError, SplitError, CompileError, PassError: in strict mode.
    """
    settings, choices = config.compilation_config, recipe.capture
    if settings.whole_program:  # prefill, and decode of other sizes, still run in pieces
        settings = settings.with_changes(splitting_ops=DEFAULT_SPLITTING_OPS)
    static = config.cache.kv_strategy == "static"
    counters, head_counters = Counters(), Counters()
    keeps = stored and not recipe.guards_runs and not recipe.places and not static
    store = _store(model, config, device, cache_dir) if keeps else None
    body = store.load("body", model, counters) if store else None
    head = store.load("head", model, head_counters) if store else None
    if body is None or head is None:
        from piecework.graph.build import Options, build_head_program, build_program

        passes = recipe.passes(model)
        compiler = recipe.compiler_of("body")
        made = Options(device, settings, passes, compiler, counters, profile, cache_dir)
        if body is None:
            # Static programs are made of the body's graph; pieces of it never run.
            pieces = replace(made, compiler=make_compiler("eager")) if static else made
            body = build_program(model, pieces)
            if store:
                store.save("body", body, model, counters)
        if head is None:
            made = replace(made, passes=HeadPasses(passes), counters=head_counters)
            made = replace(made, compiler=recipe.compiler_of("head"))
            head = build_head_program(model, made)
            if store:
                store.save("head", head, model, head_counters)
    check_placed(recipe.places, {"body": body.opaque_reason, "head": head.opaque_reason})
    if any(getattr(piece, "moved", False) for piece in (*body.pieces, *head.pieces)):
        if device.captures:
            log.warning("nothing is captured on %s: a piece runs on another device", device.name)
        choices = CaptureOptions("eager", "eager")
    sequences = max((*choices.full_sizes, *choices.whole_sizes), default=1)
    largest = max((sequences, *choices.piecewise_sizes))
    buffers = StaticBuffers(
        device,
        tokens=largest,
        sequences=sequences,
        table_width=pages_for(max_len, config.cache.page_size),
    )
    chain = make_chain(body, device, settings.chain, cache_dtype(config, model.dtype, device))
    whole = recipe.compiler if choices.whole_sizes else None
    if static:
        whole = make_compiler(recipe.compiler_name)
    programs = Programs(
        model, body, head, device, choices, buffers, counters, head_counters, config, chain, whole
    )
    if device.captures and not choices.whole_sizes and not static:
        with profile.time("capture.plan"):
            _plan(programs, ranks)
    return programs


def _store(model: CausalLM, config: EngineConfig, device: Device, cache_dir: Path) -> ProgramStore | None:
    """Where this model's programs are kept; None where they must be made anew."""
    settings = config.compilation_config
    if settings.verify_passes or settings.whole_program or debug.level() or not storable(device):
        return None
    modules = [(name, type(m).__qualname__, m.extra_repr()) for name, m in model.named_modules()]
    compilation = {k: v for k, v in asdict(settings).items() if k not in ("compile_cache_dir", "chain")}
    weights = {name: signature(tensor) for name, tensor in tensors_of(model).items()}
    parts = {
        "model": asdict(model.config),
        "modules": modules,
        "weights": weights,
        "compilation": compilation,
    }
    return ProgramStore(cache_dir, device, parts)


def _plan(programs: Programs, ranks: Ranks | None) -> None:
    """Measure what a graph takes on a cache of one page, and choose the sizes that have room."""
    layers = layer_shapes(programs.model)
    dtype = cache_dtype(programs.config, programs.model.dtype, programs.device)
    page_size = programs.config.cache.page_size
    graphs = programs.over_pages(PagedKVCache(layers, 2, page_size, dtype, programs.device))
    if graphs.wishes:
        programs.cost = measure(graphs)
        budget = int(programs.device.free_memory() * _GRAPH_SHARE)
        if ranks is not None:  # the ranks' graphs have to be of the same sizes, as their sums are
            budget, programs.cost = (
                ranks.least(budget),
                Cost(ranks.most(programs.cost.pool), ranks.most(programs.cost.graph)),
            )
        programs.plan = graphs.plan(budget, programs.cost)
    programs.counters.captures = programs.head_counters.captures = 0  # those for the measurement are gone


def cache_dtype(config: EngineConfig, dtype: torch.dtype, device: Device) -> torch.dtype:
    """Return the type that keys and values are kept in; one that the device lacks is a ConfigError."""
    if config.cache.kv_cache_dtype == "auto":
        return dtype
    if not device.int8_kv_cache:
        allowed = f"auto on {device.name}, which has no attention over keys and values of int8"
        raise ConfigError("kv_cache_dtype", config.cache.kv_cache_dtype, allowed)
    return torch.int8


def layer_shapes(model: CausalLM) -> list[LayerShape]:
    """Return what each layer of `model` keeps per token."""
    return [LayerShape(spec.num_kv_heads, spec.head_dim) for spec in model.attention_specs]
