"""Which devices, compilers and passes there are, those of other packages among them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from importlib.metadata import EntryPoint, entry_points

from piecework.compile.registry import PREFIX, known_compilers
from piecework.devices import Device
from piecework.devices.registry import GROUP, device_class, known_devices
from piecework.explain.report import Choice
from piecework.graph.passes import PassManager, available
from piecework.graph.passes.registry import ALWAYS, RAISE

OWN = "piecework"


def devices() -> tuple[Choice, ...]:
    """All devices by name, with what they can; one whose package does not load says why."""
    brought = {point.name: point for point in entry_points(group=GROUP)}
    return tuple(_device(name, brought.get(name)) for name in known_devices())


def _device(name: str, point: EntryPoint | None) -> Choice:
    origin = OWN if point is None or point.dist is None else point.dist.name
    try:
        found = device_class(name)
    except Exception as error:
        return Choice(name, origin, f"does not load: {type(error).__name__}: {error}")
    graphs = "captures graphs" if found.captures else "has no graphs"
    return Choice(name, origin, f"{graphs}; compilers {', '.join(found.compilers)}")


def compilers(device: Device) -> tuple[Choice, ...]:
    """All compilers, and which of them `device` has."""
    found = []
    for name in known_compilers():
        kind = name.removesuffix(":<backend>")
        if kind not in device.compilers:
            note = f"not on {device.name}"
        else:
            note = "the default" if kind == device.default_compiler() else ""
        if name.startswith(PREFIX):
            note = "; ".join(part for part in (note, ", ".join(_backends())) if part)
        found.append(Choice(name, OWN, note))
    return tuple(found)


def _backends() -> list[str]:
    from torch._dynamo.backends.registry import list_backends

    return sorted(name for name in list_backends() if name != OWN)


def passes(
    manager: PassManager,
    disabled: Iterable[str],
    wins: Collection[str] = (),
    *,
    chosen: Collection[str] | None = None,
    refused: Collection[str] = (),
) -> tuple[Choice, ...]:
    """All passes, and whether `manager` runs them.

    `disabled` are those that a user left out, `chosen` the only ones that one wanted, `refused` those that
    verification took back; `wins` are the fusions that run by default on the device.
    """
    listed, left_out = {p.name for p in manager.passes}, set(disabled)
    found = [Choice(ALWAYS, OWN, "disabled" if ALWAYS in left_out else "runs, before all others")]
    for name, choice in available().items():
        if name in left_out:
            note = "disabled"
        elif name in listed:
            note = "refused by verification" if name in refused else "runs"
        elif chosen is not None:
            note = "not run: not among the passes that were chosen"
        elif name in RAISE:
            note = "not run: for models that are not made of named ops"
        else:
            note = "not run: " + ("the model has nothing for it" if name in wins else "off by default here")
        found.append(Choice(name, choice.origin, note))
    return tuple(found)
