"""What `explain` knows: plain values, which go into JSON as they are."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

CODED = "bfloat16 in 12 bits"
"""The type of matrices that are coded; which can be is known when their weights are read."""


@dataclass(frozen=True)
class Kind:
    """A distinct piece. `uses` are the numbers of the pieces that are of this kind, from 0.

    `lines` is its graph, `source` what it runs as text, `failure` why its compiler did not take it.
    """

    letter: str
    key: str
    uses: tuple[int, ...]
    ops: dict[str, int]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    compiler: str
    seconds: float
    cached: bool
    failure: str | None
    lines: tuple[str, ...] = field(repr=False)
    source: str = field(repr=False)


@dataclass(frozen=True)
class Step:
    """One step of a program: a piece, with its kind's letter, or a hole, with its op and its layer."""

    piece: int | None = None
    kind: str = ""
    hole: str = ""
    layer: int | None = None


@dataclass(frozen=True)
class PassEntry:
    """One pass, as in piecework.graph.passes.report. `rewrites`: lines that went and lines that came."""

    name: str
    status: str
    reason: str
    matches: int
    expected: str | None
    refused: dict[str, int]
    ops_before: int
    ops_after: int
    ms: float
    bound: str
    error: float | None
    rewrites: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]


@dataclass(frozen=True)
class ProgramReport:
    """A program. `ops_traced` and `ops` count calls by op before and after all passes.

    `seconds` has the stages trace, passes, verification, split and compile; `lines` is the flat graph
    after passes.
    """

    name: str
    graphs_traced: int
    pieces: int
    holes: int
    distinct_pieces: int
    opaque_reason: str | None
    seconds: dict[str, float]
    ops_traced: dict[str, int]
    ops: dict[str, int]
    passes: tuple[PassEntry, ...]
    steps: tuple[Step, ...]
    kinds: tuple[Kind, ...]
    lines: tuple[str, ...] = field(repr=False)


@dataclass(frozen=True)
class CaptureReport:
    """Graph modes of both phases (and those that the device has), and what will be captured.

    `bytes` are all graphs', `pool_bytes` what they share, `graph_bytes` each one's own; None where the
    device captures nothing. `dropped`: program, sizes, reason. `eager_steps`: how a step outside graphs runs.
    """

    decode: str
    prefill: str
    decode_modes: tuple[str, ...]
    prefill_modes: tuple[str, ...]
    graph_budget: int | None
    sizes: dict[str, tuple[int, ...]]
    graphs: int
    bytes: int | None
    pool_bytes: int | None
    graph_bytes: int | None
    dropped: tuple[tuple[str, tuple[int, ...], str], ...]
    eager_steps: str


@dataclass(frozen=True)
class BreakEven:
    """Up to how many tokens captured prefill is faster than eager pieces; `note` says it in words.

    `measured`: tokens, milliseconds eager, milliseconds captured.
    """

    tokens: int | None
    note: str
    measured: tuple[tuple[int, float, float], ...] = ()


@dataclass(frozen=True)
class Weights:
    """How many matrices in memory are of one type (a kind of GGUF's blocks, or a dtype), and their bytes."""

    type: str
    matrices: int
    bytes: int


@dataclass(frozen=True)
class Choice:
    """Something that can be chosen by name: a device, a compiler, a pass. `origin` is who brings it."""

    name: str
    origin: str
    note: str = ""


@dataclass(frozen=True)
class Report:
    """Everything about one model on one device. `layers` are the model's; `dtype` is the run's."""

    model: str
    architecture: str
    layers: int
    device: str
    dtype: str
    max_model_len: int
    compiler: str
    weights: tuple[Weights, ...]
    programs: tuple[ProgramReport, ...]
    capture: CaptureReport
    break_even: BreakEven
    devices: tuple[Choice, ...]
    compilers: tuple[Choice, ...]
    passes: tuple[Choice, ...]

    @property
    def body(self) -> ProgramReport:
        """The body's program, which the counts are about."""
        return self.programs[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the body's `pieces`, `holes` and `distinct_pieces` at the top."""
        body = self.body
        counts = {
            "graphs_traced": body.graphs_traced,
            "pieces": body.pieces,
            "holes": body.holes,
            "distinct_pieces": body.distinct_pieces,
        }
        values = _plain(asdict(self))
        assert isinstance(values, dict)
        return {**{k: values.pop(k) for k in ("model", "architecture", "device")}, **counts, **values}


def _plain(value: Any) -> Any:
    """JSON has no infinity: an error that is infinite becomes text."""
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return "inf" if value == float("inf") else value
