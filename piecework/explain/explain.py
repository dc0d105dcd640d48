"""Makes a model's programs as the engine would, without reading a weight, and reports on them."""

from __future__ import annotations

from piecework.capture.plan import CapturePlan
from piecework.compile.chain import Chain
from piecework.config import EngineConfig
from piecework.devices import make_device
from piecework.devices.injected import read_faults
from piecework.errors import ConfigError
from piecework.explain.available import compilers, devices, passes
from piecework.explain.breakeven import break_even
from piecework.explain.outline import open_outline, outline
from piecework.explain.programs import describe_program
from piecework.explain.report import CaptureReport, Report
from piecework.explain.weights import describe_weights
from piecework.graph.passes.sets import default_fusions
from piecework.models.config import ModelConfig
from piecework.profile import Profile
from piecework.runner.load import context_limit, piece_folder
from piecework.runner.precision import settle
from piecework.runner.programs import Programs, make_programs
from piecework.runner.recipe import Recipe, make_recipe
from piecework.runner.spare import Spares
from piecework.weights.source import resolve


def explain(config: EngineConfig) -> Report:
    """Build the programs that `config` asks for and say everything about them.

    Parameters are allocated where the device needs them, but not read: only the model's configuration is.

    Raises:
        ModelError, ConfigError: as when the model is loaded.
        TraceError, SplitError, CompileError, PassError: in strict mode.
    """
    first, *behind = config.device.devices
    faults = read_faults(config.device.inject_fault, len(behind) + 1)
    device = make_device(first, [fault for fault in faults if fault.device == 0])
    device.set_threads(config.device.threads)
    options = config.load
    if config.cache.kv_strategy == "static":
        allowed = "paged: explain shows pieces, and a static program is whole"
        raise ConfigError("kv_strategy", "static", allowed)
    source = resolve(options.model, revision=options.revision, cache_dir=options.cache_dir)
    checkpoint = open_outline(source, options)
    model_config = ModelConfig.from_dict(checkpoint.config)
    dtype, quantization = settle(options, checkpoint, model_config.dtype, device)
    limit = context_limit(options.max_model_len, model_config)
    spares = Spares(tuple(behind))
    recipe = make_recipe(config, device, model_config, dtype, limit, spares)
    model = outline(
        model_config,
        checkpoint,
        quantization,
        options.lm_head,
        dtype=dtype,
        device=device.torch_device,
        max_positions=limit,
        repacked=recipe.repacks,
    )
    checkpoint.close()
    device.prepare_weights(model)
    folder = piece_folder(config)
    programs = make_programs(model, recipe, config, device, Profile(), folder, limit, stored=False)
    return report_on(programs, recipe, limit)


def report_on(programs: Programs, recipe: Recipe, max_len: int) -> Report:
    """Report on programs that are there."""
    config, device = programs.config, programs.device
    model = programs.model
    described = (describe_program("body", programs.body), describe_program("head", programs.head))
    return Report(
        model=config.load.model,
        architecture=model.config.architecture,
        layers=model.config.num_layers,
        device=config.device.device,
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=max_len,
        compiler=recipe.compiler.name,
        weights=describe_weights(model),
        programs=described,
        capture=describe_captures(programs),
        break_even=break_even(programs),
        devices=devices(),
        compilers=compilers(device),
        passes=passes(
            recipe.passes(model),
            config.compilation_config.disable_passes,
            default_fusions(device.name, model.dtype),
            chosen=config.compilation_config.passes,
            refused={
                entry.name for program in described for entry in program.passes if entry.status == "refused"
            },
        ),
    )


def describe_captures(programs: Programs) -> CaptureReport:
    """Describe the capture plan, and what it was chosen from."""
    plan = programs.plan or CapturePlan({}, 0, None)
    dropped: dict[tuple[str, str], list[int]] = {}
    for gone in plan.dropped:
        dropped.setdefault((gone.name, gone.reason), []).append(gone.size)
    device, cost = programs.device, programs.cost
    return CaptureReport(
        decode=programs.options.decode,
        prefill=programs.options.prefill,
        decode_modes=device.graph_modes("decode"),
        prefill_modes=device.graph_modes("prefill"),
        graph_budget=device.graph_budget,
        sizes={name: tuple(sizes) for name, sizes in plan.sizes.items()},
        graphs=plan.graphs,
        bytes=plan.bytes,
        pool_bytes=cost.pool if cost is not None else None,
        graph_bytes=cost.graph if cost is not None else None,
        dropped=tuple((name, tuple(sorted(sizes)), reason) for (name, reason), sizes in dropped.items()),
        eager_steps=_eager_steps(programs.chain),
    )


def _eager_steps(chain: Chain | str) -> str:
    if isinstance(chain, str):
        return f"run piece by piece ({chain})"
    return f"run as one call, of {len(chain.plan.calls)} kernels"
