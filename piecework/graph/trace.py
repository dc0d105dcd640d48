"""One graph of a model for every number of tokens."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from piecework.errors import PieceworkError
from piecework.graph.binding import MAX_TOKENS, Binding
from piecework.graph.recorder import Recorder
from piecework.graph.symbols import (
    assumptions,
    new_fake_mode,
    new_symbol,
    symbolic_sizes,
)
from piecework.layers.attention import emit_attention
from piecework.profile import now


class TraceError(PieceworkError):
    """A model that can't be traced; `reason` says why, with the place in the model's code."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"the model cannot be traced: {reason}")


@dataclass
class Traced:
    """A flat graph, and for each of its placeholders, in order, what it stands for."""

    graph_module: fx.GraphModule
    bindings: list[Binding]
    single: bool
    """The function returned one tensor and not a sequence."""
    max_tokens: int
    seconds: float


def trace(
    fn: Callable[..., Any],
    example_inputs: Sequence[Tensor],
    *,
    names: Sequence[str] | None = None,
    dynamic: Sequence[int] | None = None,
    max_tokens: int = MAX_TOKENS,
) -> Traced:
    """Trace `fn`, a module or a function that uses one (as a method does), once for all token counts.

    Args:
        fn: gets the inputs by position and returns a tensor or a sequence of tensors.
        example_inputs: only their shapes, dtypes and devices count; nothing is computed.
        names: the inputs' names.
        dynamic: which inputs have the token count as their first dimension; by default those whose
            first dimension is that of the first input.
        max_tokens: the largest count; the least is 1.

    Raises:
        TraceError: the model looks at values, or decides by the number of tokens.
    """
    start = now()
    names = names or [f"input_{i}" for i in range(len(example_inputs))]
    if dynamic is None:
        tokens = example_inputs[0].shape[0]
        dynamic = [i for i, x in enumerate(example_inputs) if x.dim() and x.shape[0] == tokens]
    mode = new_fake_mode()
    with symbolic_sizes(), torch.inference_mode(False), torch.no_grad(), emit_attention():
        count = new_symbol(mode, "tokens", max_tokens)
        fakes: list[Any] = []
        with mode:
            for i, x in enumerate(example_inputs):
                shape = (count, *x.shape[1:]) if i in dynamic else x.shape
                fakes.append(torch.empty(shape, dtype=x.dtype, device=x.device))
        recorder = Recorder(mode, list(zip(names, fakes, strict=True)))
        try:
            with mode, recorder:
                result = fn(*fakes)
            single = isinstance(result, Tensor)
            recorder.finish([result] if single else list(result))
        except Exception as error:
            raise TraceError(_reason(error)) from error
        if failed := assumptions(mode):
            raise TraceError("it decides by the number of tokens: " + "; ".join(failed))
    graph_module = fx.GraphModule(nn.Module(), recorder.graph)
    bindings = _bindings(fn, recorder)
    return Traced(graph_module, bindings, single, max_tokens, now() - start)


def _bindings(fn: Callable[..., Any], recorder: Recorder) -> list[Binding]:
    module = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    known: dict[int, str] = {}
    if isinstance(module, nn.Module):
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            known.setdefault(id(tensor), name)
    found: list[Binding] = []
    for node in recorder.graph.find_nodes(op="placeholder"):
        if node in recorder.lifted:
            tensor = recorder.lifted[node]
            name = known.get(id(tensor), node.name.replace("weight", "constant"))
            found.append(Binding("weight", name, tensor))
        else:
            found.append(Binding("input", str(node.target)))
    return found


def _reason(error: Exception) -> str:
    """One line: what went wrong, and the last place outside of torch and this package's tracer."""
    place = ""
    ours = {__file__, *(str(Path(__file__).with_name(name)) for name in ("recorder.py", "propagate.py"))}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if f"{os.sep}torch{os.sep}" not in frame.filename and frame.filename not in ours:
            place = f" ({Path(frame.filename).name}:{frame.lineno}: {frame.line})"
            break
    lines = str(error).strip().splitlines() or [""]
    kind = type(error).__name__
    if "DataDependent" in kind or "DynamicOutputShape" in kind:
        return f"it depends on values that only a run has, through {lines[0]}{place}"
    return f"{kind}: {lines[0]}{place}"
