"""How a model's programs will be made: settled from the settings and the device before weights are read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import fx

from piecework import ops
from piecework.capture.options import CaptureOptions, choose_options
from piecework.compile.base import Compiler
from piecework.compile.registry import PREFIX, make_compiler
from piecework.config import EngineConfig
from piecework.devices import Device
from piecework.errors import ConfigError
from piecework.failsafe.policy import Policy
from piecework.graph.program import ATTENTION
from piecework.models.config import ModelConfig
from piecework.runner.spare import FailsafeCompiler, Spares

if TYPE_CHECKING:
    from piecework.graph.passes import PassManager, Report, Structure
    from piecework.models.decoder import CausalLM


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
    spares: Spares | None = None
    policy: Policy | None = None
    at_run: bool = False
    _made: dict[Structure, PassManager] = field(default_factory=dict, repr=False, compare=False)

    @property
    def guards_runs(self) -> bool:
        """Whether pieces can move when they run, which pieces that come from the disk can't."""
        full = self.policy is not None and self.policy.failover == "full"
        return self.spares is not None and bool(self.spares.names) and full and self.at_run

    @functools.cached_property
    def compiler(self) -> Compiler:
        """The compiler of pieces; with `spares` a piece that fails goes to one of those devices."""
        made = make_compiler(self.compiler_name)
        if (
            self.spares is None
            or not self.spares.names
            or self.policy is None
            or self.policy.failover == "off"
        ):
            return made
        return FailsafeCompiler(made, self.spares, self.policy, self.guards_runs)

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
    check_splitting_ops(settings.splitting_ops)
    capture = choose_options(
        settings,
        device,
        max_num_seqs=steps.max_num_seqs,
        max_tokens=steps.max_num_batched_tokens,
        max_model_len=max_len,
    )
    recipe = Recipe(
        capture,
        compiler_name(settings.compiler, device),
        functools.partial(make_passes, config, device, model, dtype),
        spares,
        Policy(config.device.failover),  # type: ignore[arg-type]
        at_run=not device.chains and capture.decode == capture.prefill == "eager",
    )
    if settings.compiler != "auto":
        _ = recipe.compiler
    if settings.passes is not None or settings.disable_passes:
        from piecework.graph.passes.registry import check_names

        check_names(settings.passes, settings.disable_passes)
    return recipe


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
        splitting_ops=settings.splitting_ops,
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
    """
    for name in names:
        # torch raises for a name without a namespace.
        if "::" not in name or not torch._C._jit_get_schemas_for_operator(name):
            known = [ops.get(own).qualified_name for own in ops.names()]
            own = ", ".join(sorted(known, key=lambda op: op != ATTENTION))
            raise ConfigError("splitting_ops", name, f"ops that are registered with torch, such as {own}")
    if ATTENTION not in names:
        raise ConfigError("splitting_ops", list(names), f"a list with {ATTENTION}, which the runner fills in")


def compiler_name(name: str, device: Device) -> str:
    """Return the compiler's name, `auto` being the device's choice; one that it lacks is a ConfigError."""
    if name == "auto":
        name = device.default_compiler()
    kind = PREFIX.removesuffix(":") if name.startswith(PREFIX) else name
    if kind not in device.compilers:
        has = ", ".join(f"{PREFIX}<backend>" if c + ":" == PREFIX else c for c in device.compilers)
        raise ConfigError("compiler", name, f"one of {has}, which the device {device.name} has, or auto")
    return name
