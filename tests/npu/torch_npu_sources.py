"""Signatures of Python functions as they stand in source text: of released wheels and of the stand-in."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

TWIN = Path(__file__).parent / "twin"
GRAPHS = "torch_npu/npu/graphs.py"
PACKAGE = "torch_npu/npu/__init__.py"
HANDLERS = "torch_npu/npu/_npugraph_handlers/ifa_handler.py"
USED: dict[str, tuple[str, ...]] = {
    GRAPHS: (
        "graph_pool_handle",
        "NPUGraph",
        "NPUGraph.capture_begin",
        "NPUGraph.capture_end",
        "NPUGraph.replay",
        "NPUGraph.reset",
        "NPUGraph.update",
        "_GraphDispatchMode.update_capture_record",
        "graph",
        "graph.__enter__",
        "graph.__exit__",
    ),
    "torch_npu/npu/streams.py": ("Stream", "Stream.wait_stream", "Stream.synchronize"),
    "torch_npu/npu/utils.py": ("current_stream", "set_device", "stream", "synchronize"),
    "torch_npu/npu/memory.py": ("empty_cache",),
    PACKAGE: ("is_available", "device_count", "get_device_name", "mem_get_info"),
}
"""What the device class uses, file by file; a class stands for the arguments that make one."""
EXPORTED = (
    *("NPUGraph", "graph", "graph_pool_handle", "Stream", "current_stream", "set_device", "stream"),
    *("synchronize", "empty_cache", "is_available", "device_count", "get_device_name", "mem_get_info"),
)


def wheel_sources(path: Path) -> dict[str, str]:
    """Return the text of the files above from a wheel, those that it has."""
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        return {name: wheel.read(name).decode() for name in (*USED, HANDLERS) if name in names}


def twin_sources() -> dict[str, str]:
    """Return the text of the same files of the stand-in."""
    return {name: (TWIN / name).read_text(encoding="utf-8") for name in USED}


def signatures(text: str) -> dict[str, list[str]]:
    """Return the parameters of each function and method by name, with their defaults; `self` is left out."""
    found: dict[str, list[str]] = {}
    for prefix, node in _functions(ast.parse(text)):
        parameters = _parameters(node.args, skip=bool(prefix))
        constructor = prefix and node.name in ("__init__", "__new__")
        name = prefix if constructor else ".".join(filter(None, (prefix, node.name)))
        if len(parameters) >= len(found.get(name, ())):
            found[name] = parameters
    return found


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield "", node
        elif isinstance(node, ast.ClassDef):
            yield from ((node.name, inner) for inner in node.body if isinstance(inner, ast.FunctionDef))


def _parameters(args: ast.arguments, skip: bool) -> list[str]:
    places = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    defaults = [ast.unparse(value) for value in args.defaults]
    first = len(places) - len(defaults)
    written = [name if i < first else f"{name}={defaults[i - first]}" for i, name in enumerate(places)]
    written = written[1:] if skip else written
    written += [f"*{args.vararg.arg}"] if args.vararg else []
    written += [
        arg.arg if value is None else f"*, {arg.arg}={ast.unparse(value)}"
        for arg, value in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    return written + ([f"**{args.kwarg.arg}"] if args.kwarg else [])


def differences(release: Mapping[str, str], twin: Mapping[str, str]) -> list[str]:
    """Say what of a release is not as the stand-in has it."""
    wrong = []
    for file, names in USED.items():
        theirs, ours = signatures(release[file]), signatures(twin[file])
        for name in names:
            if name not in theirs or name not in ours:
                wrong.append(f"{file}: no {name} in {'the release' if name in ours else 'the stand-in'}")
            elif theirs[name] != ours[name]:
                wrong.append(f"{file}: {name}({', '.join(theirs[name])}), not ({', '.join(ours[name])})")
    exported = _strings(release[PACKAGE])
    wrong += [f"{PACKAGE}: {name} is not exported" for name in EXPORTED if name not in exported]
    graphs = ast.parse(release[GRAPHS])
    imported = {
        alias.name for node in ast.walk(graphs) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    attributes = {node.attr for node in ast.walk(graphs) if isinstance(node, ast.Attribute)}
    if "_weak_ref_tensor" not in imported:
        wrong.append(f"{GRAPHS}: _weak_ref_tensor is not in torch_npu._C")
    for name in ("graph_dispatch_mode", "graph_dispatch_records", "auto_dispatch_capture"):
        if name not in attributes:
            wrong.append(f"{GRAPHS}: no attribute {name}")
    known = _strings(release[GRAPHS]) | _strings(release.get(HANDLERS, ""))
    if "npu_fused_infer_attention_score.default" not in known:
        wrong.append(f"{GRAPHS}: npu_fused_infer_attention_score can't be updated in a graph")
    return wrong


def _strings(text: str) -> set[str]:
    nodes = ast.walk(ast.parse(text))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
