"""How a model's programs will be made: settled from the settings and the device before weights are read."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, fx

from piecework import ops
from piecework.capture.options import CaptureOptions, choose_options
from piecework.compilation import DEFAULT_SPLITTING_OPS, CompilationConfig, own_op
from piecework.compile.base import Compiler
from piecework.compile.registry import PREFIX, make_compiler
from piecework.config import EngineConfig
from piecework.devices import Device
from piecework.errors import ConfigError
from piecework.failsafe.policy import Policy
from piecework.graph.program import ATTENTION
from piecework.models.config import ModelConfig
from piecework.ops.registry import REFERENCE
from piecework.runner.placing import FIELD as PLACE
from piecework.runner.placing import HEAD, PlacingCompiler, read_places
from piecework.runner.spare import FailsafeCompiler, Spares

if TYPE_CHECKING:
    from piecework.graph.passes import PassManager, Report, Structure
    from piecework.models.decoder import CausalLM

log = logging.getLogger("piecework.capture")


@dataclass(frozen=True)
class HeadPasses:
    """The passes of a model on its head, which is no whole model: numbers of matches are not expected."""

    manager: PassManager

    def apply(self, graph_module: fx.GraphModule) -> Report:
        """Run all passes and say what they did."""
        return self.manager.apply(graph_module, expectations=False)


@dataclass(frozen=True)
class Recipe:
    """Everything that can be wrong about `compilation_config` has been refused when there is one.

    Compiler and passes are made, and what they need is imported, when a program has to be built.
    """

    capture: CaptureOptions
    compiler_name: str
    make_passes: Callable[[Structure], PassManager]
    spares: Spares = field(default_factory=Spares)
    policy: Policy = field(default_factory=Policy)
    at_run: bool = False
    repacks: bool = False
    places: Mapping[str, Device] = field(default_factory=dict)
    _made: dict[Structure, PassManager] = field(default_factory=dict, repr=False, compare=False)

    @property
    def guards_runs(self) -> bool:
        """Whether pieces can move when they run, which pieces that come from the disk can't."""
        return bool(self.spares.names) and self.policy.failover == "full" and self.at_run

    @functools.cached_property
    def compiler(self) -> Compiler:
        """The compiler of pieces; with `spares` a piece that fails goes to one of those devices."""
        made = make_compiler(self.compiler_name)
        if not self.spares.names or self.policy.failover == "off":
            return made
        return FailsafeCompiler(made, self.spares, self.policy, self.guards_runs)

    def compiler_of(self, program: Literal["body", "head"]) -> Compiler:
        """The compiler of one of the programs, with those of the devices on which pieces of it were put."""
        own = {piece: d for piece, d in self.places.items() if (piece == HEAD) == (program == "head")}
        return PlacingCompiler(self.compiler, own) if own else self.compiler

    def passes(self, model: CausalLM) -> PassManager:
        """The passes of the model's graph: what there is to fuse depends on how its layers are quantised."""
        from piecework.graph.passes.structure import Structure

        structure = Structure.read(model)
        if structure not in self._made:
            self._made[structure] = self.make_passes(structure)
        return self._made[structure]


def make_recipe(
    config: EngineConfig,
    device: Device,
    model: ModelConfig,
    dtype: torch.dtype,
    max_len: int,
    spares: Spares | None = None,
) -> Recipe:
    """Settle compiler, passes, graph modes and sizes for contexts of at most `max_len` tokens.

    `spares` are devices for pieces that fail on `device`.

    Raises:
        ConfigError: a splitting op, compiler, pass, mode or size that doesn't exist, or that the device or
            a step has no room for.
    """
    settings, steps = config.compilation_config, config.scheduler
    if not settings.whole_program:
        check_splitting_ops(settings.splitting_ops)
    capture = choose_options(
        settings,
        device,
        max_num_seqs=steps.max_num_seqs,
        max_tokens=steps.max_num_batched_tokens,
        max_model_len=max_len,
    )
    capture = without_reference(capture, settings, device, model, dtype, config.cache.page_size)
    if config.cache.kv_strategy == "static":
        capture = CaptureOptions("eager", "eager")
    places = read_places(config.device.place, dtype)
    _check_places(places, config)
    recipe = Recipe(
        capture,
        compiler_name(settings.compiler, device, strict=settings.strict),
        functools.partial(make_passes, config, device, model, dtype),
        spares or Spares(),
        Policy(config.device.failover),  # type: ignore[arg-type]
        places=places,
        repacks=repacks(config, device, alone=spares is None or not spares.names),
        at_run=not device.chains and capture.decode == capture.prefill == "eager",
    )
    if settings.compiler != "auto":
        _ = recipe.compiler
    if settings.passes is not None or settings.disable_passes:
        from piecework.graph.passes.registry import check_names

        check_names(settings.passes, settings.disable_passes)
    return recipe


def repacks(config: EngineConfig, device: Device, *, alone: bool) -> bool:
    """Whether weights are laid out for the kernels: every piece has to run where they are.

    `alone`: no piece that fails on `device` can go to another one.
    """
    wanted = config.load.repack and alone and config.device.place is None and device.reads_panels()
    return wanted and compiler_name(config.compilation_config.compiler, device) == "native"


def _check_places(places: Mapping[str, Device], config: EngineConfig) -> None:
    """Refuse pieces of a body that runs as whole programs, by name."""
    static = config.cache.kv_strategy == "static"
    if static and places.keys() - {HEAD}:
        raise ConfigError(PLACE, config.device.place, f"{HEAD} with kv_strategy=static: the body is whole")
    if places and config.compilation_config.whole_program:
        raise ConfigError(PLACE, config.device.place, "nothing where splitting_ops is empty")


def without_reference(
    capture: CaptureOptions,
    settings: CompilationConfig,
    device: Device,
    model: ModelConfig,
    dtype: torch.dtype,
    page_size: int,
) -> CaptureOptions:
    """Let decode be captured in pieces where attention would run as the reference.

    That one reads lengths on the host, so a full graph would go on with those of its capture. Raises
    ConfigError where full graphs were asked for.
    """
    windows = {model.window(layer) for layer in range(model.num_layers)}
    if capture.decode != "full" or all(
        _attention(device, model, dtype, page_size, window) != REFERENCE for window in windows
    ):
        return capture
    what = f"attention in {dtype} over pages of {page_size} tokens (page_size)"
    what += f" with windows of {max(windows)} tokens" if any(windows) else ""
    if settings.decode_graph == "full":
        allowed = f"piecewise or eager, since the device {device.name} has no kernel for {what}"
        raise ConfigError("decode_graph", "full", allowed)
    log.warning("decode_graph=piecewise: the device %s has no kernel for %s", device.name, what)
    return replace(capture, decode="piecewise")


def _attention(device: Device, model: ModelConfig, dtype: torch.dtype, page_size: int, window: int) -> str:
    """Return the name of the implementation that decodes."""

    def rows(heads: int) -> Tensor:
        return torch.empty(1, heads, model.head_dim, dtype=dtype, device="meta")

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    q, k = rows(model.num_heads), rows(model.num_kv_heads)
    cache = torch.empty(1, model.num_kv_heads, page_size, model.head_dim, dtype=dtype, device="meta")
    index = (ints(1), ints(1, 1), ints(2), ints(1))
    args = (q, k, k, q, cache, cache, *index, 1, model.head_dim**-0.5, window)
    return ops.get("paged_attention").resolve(device.op_order, *args).name


def make_passes(
    config: EngineConfig, device: Device, model: ModelConfig, dtype: torch.dtype, structure: Structure
) -> PassManager:
    """Make the passes that `config` asks for; an unknown name is a ConfigError."""
    from piecework.graph.passes import FusionPlan, make_manager

    settings = config.compilation_config
    return make_manager(
        settings.passes,
        settings.disable_passes,
        fusions=FusionPlan.of(device.name, dtype, structure),
        strict=settings.strict,
        verify=settings.verify_passes,
        device=device.name,
        dtype=dtype,
        layers=model.num_layers,
        splitting_ops=settings.cuts or DEFAULT_SPLITTING_OPS,
        parameters={
            "eps": model.rms_norm_eps,
            "head_dim": model.head_dim,
            "num_heads": model.num_heads,
            "num_kv_heads": model.num_kv_heads,
            "hidden_size": model.hidden_size,
        },
    )


def check_splitting_ops(names: Sequence[str]) -> None:
    """Refuse a name that is no op, and a list without attention, which must stand between pieces.

    A piece has no place for the KV cache: attention inside one would see its own batch's tokens only.
    Another engine's attention stands for ours, and a warning says so.
    """
    for name in map(own_op, names):
        # torch raises for a name without a namespace.
        if "::" not in name or not torch._C._jit_get_schemas_for_operator(name):
            known = [ops.get(own).qualified_name for own in ops.names()]
            own = ", ".join(sorted(known, key=lambda op: op != ATTENTION))
            raise ConfigError("splitting_ops", name, f"ops that are registered with torch, such as {own}")
    if ATTENTION not in map(own_op, names):
        raise ConfigError(
            "splitting_ops",
            list(names),
            f"a list with {ATTENTION}, which the runner fills in; an empty one with compiler {PREFIX}<name>",
        )
    for name in names:
        if own_op(name) != name:
            log.warning("splitting_ops: %s stands for %s, attention on every device", name, own_op(name))


def compiler_name(name: str, device: Device, *, strict: bool = False) -> str:
    """Return the compiler's name, `auto` being the device's choice; one that it lacks is a ConfigError.

    A device may name another compiler that stands in for one: that is a warning, a ConfigError in strict
    mode.
    """
    if name == "auto":
        name = device.default_compiler()
    for other in device.stand_ins:
        if other.compiler == name:
            if strict:
                raise ConfigError(
                    "compiler", name, f"{other.by} on the device {device.name}, where {other.reason}"
                )
            log.warning(
                "compiler=%s becomes %s on the device %s: %s", name, other.by, device.name, other.reason
            )
            name = other.by
    kind = PREFIX.removesuffix(":") if name.startswith(PREFIX) else name
    if kind not in device.compilers:
        has = ", ".join(f"{PREFIX}<backend>" if c + ":" == PREFIX else c for c in device.compilers)
        raise ConfigError("compiler", name, f"one of {has}, which the device {device.name} has, or auto")
    return name
