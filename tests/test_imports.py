"""Imports point one way, and the heavy ones happen only where they are needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "piecework"
KERNELS = PACKAGE / "ops" / "triton" / "kernels"  # written in Triton, imported by the first call of one
OPENVINO = PACKAGE / "compile" / "openvino"  # imported when that compiler is made
APART = {KERNELS, OPENVINO}
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}

BOTTOM = {
    "allocator",
    "cache",
    "collector",
    "compilation",
    "debug",
    "json_text",
    "tables",
    "version",
    "errors",
    "units",
    "config",
    "sampling",
    "profile",
}
MODEL = {"ops", "layers", "models"}
BESIDE = {"weights", "tokenizer"}
PROGRAM = {"graph", "compile", "capture"}
RUN = {"devices", "kvcache", "quantization", "runner", "failsafe", "workers"}
# Folder or module -> what it may import from the package, beside itself and the bottom.
ALLOWED: dict[str, set[str]] = {
    "native": set(),
    "ops": {"native"},
    "layers": {"ops", "models.config"},
    "models": {"ops", "layers"},
    "weights": MODEL | {"native", "tokenizer"},
    "tokenizer": {"weights"},
    "quantization": MODEL | {"native", "weights", "tokenizer"},
    "devices": {"native", "ops"},
    "kvcache": {"native", "ops", "devices"},
    "compile": {"native", "ops", "devices", "graph"},
    "graph": {"ops", "devices", "layers", "models", "compile"},
    "capture": {"ops", "devices", "graph", "kvcache"},
    "failsafe": {"devices"},
    "runner": MODEL | BESIDE | PROGRAM | {"devices", "failsafe", "kvcache", "quantization"},
    # A step's tasks are programs over a paged cache, with the kinds of attention that the model has.
    # A rank of several says which part of the model is its own.
    "workers": {"devices", "failsafe", "runner", "graph", "kvcache", "layers", "models.shard"},
    "explain": MODEL | BESIDE | PROGRAM | RUN,
    "engine": MODEL | BESIDE | RUN | {"explain"},
    "llm": {"engine"} | BESIDE,
    "server": {"engine", "llm", "models", "workers"} | BESIDE,
    "bench": {"engine", "llm", "models", "devices", "kvcache", "native", "ops", "runner", "workers"} | BESIDE,
    "eval": {"engine", "llm", "models", "bench"} | BESIDE,
    "cli": {"quantization", "engine", "llm", "models", "server", "bench", "eval", "explain"} | BESIDE,
}
CORE = BOTTOM | {"native"} | MODEL | BESIDE | PROGRAM | RUN | {"engine", "explain", "llm"}
# The core runs where these are not installed; who needs one imports it inside a function.
LAZY = {"fastapi", "gguf", "httpx", "huggingface_hub", "msgspec", "prometheus_client", "rich"}
LAZY |= {"openvino", "starlette", "transformers", "triton", "uvicorn"}


def _unit(path: Path) -> str:
    """The folder or top module that a file belongs to; `""` for the package's own __init__."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0] if parts[0] not in ("__init__", "__main__") else ""


def _imports(node: ast.AST, path: Path) -> Iterator[tuple[str, int]]:
    for part in ast.walk(node):
        if isinstance(part, ast.Import):
            yield from ((name.name, part.lineno) for name in part.names)
        elif isinstance(part, ast.ImportFrom):
            assert part.level == 0, f"{path}:{part.lineno} is a relative import"
            if part.module == "piecework":
                yield from ((f"piecework.{name.name}", part.lineno) for name in part.names)
            else:
                yield (part.module or "", part.lineno)


def _top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run at import: not those in functions, nor those for the type checker only."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
            continue
        inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
        if inner or isinstance(node, ast.Try):
            handlers = node.handlers if isinstance(node, ast.Try) else []
            waiting += inner + [statement for handler in handlers for statement in handler.body]
        else:
            yield node


def test_imports_point_one_way() -> None:
    wrong = []
    for path, tree in TREES.items():
        unit = _unit(path)
        if unit == "":
            continue
        assert unit in BOTTOM or unit in ALLOWED, f"{unit} has no place in the table of this test"
        allowed = {unit, *BOTTOM, *ALLOWED.get(unit, ())}
        for name, line in _imports(tree, path):
            parts = name.split(".")
            if parts[0] == "piecework" and not {".".join(parts[1:2]), ".".join(parts[1:3])} & {*allowed, ""}:
                wrong.append(f"{path.relative_to(PACKAGE)}:{line} imports {name}")
    assert wrong == []


def test_heavy_imports_are_lazy() -> None:
    wrong = []
    for path, tree in TREES.items():
        unit = _unit(path)
        if unit not in CORE | {"", "cli"} or APART & set(path.parents):
            continue
        lazy = LAZY | {"torch"} if unit in BOTTOM | {"", "cli"} else LAZY
        for statement in _top_level(tree):
            for name, line in _imports(statement, path):
                if name.split(".")[0] in lazy:
                    wrong.append(f"{path.relative_to(PACKAGE)}:{line} imports {name}")
    assert wrong == []


def test_the_bottom_imports_only_the_bottom() -> None:
    assert {unit for unit in ALLOWED if ALLOWED[unit] & BOTTOM} == set()
    assert all((PACKAGE / f"{unit}.py").is_file() or (PACKAGE / unit).is_dir() for unit in BOTTOM)


def _loaded(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after `code`."""
    script = f"{code}\nimport sys\nprint(*sorted({{n.split('.')[0] for n in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import piecework",
        "import piecework.config, piecework.sampling, piecework.profile",
        "from piecework import SamplingParams, EngineConfig",
        "from piecework.cli.main import usage; usage()",
        "from piecework.cli.generate import make_parser; make_parser()",
    ],
)
def test_light_imports_stay_light(code: str) -> None:
    assert not _loaded(code) & ({"torch", "numpy"} | LAZY)


def test_the_core_runs_without_the_optional_packages() -> None:
    blocked = "\n".join(f"sys.modules[{name!r}] = None" for name in sorted(LAZY - {"transformers"}))
    modules = sorted(
        "piecework." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for path in FILES
        if _unit(path) in CORE and path.name != "__init__.py" and not APART & set(path.parents)
    )
    code = f"import sys\n{blocked}\nimport importlib\nfor name in {modules!r}: importlib.import_module(name)"
    assert "torch" in _loaded(code)
