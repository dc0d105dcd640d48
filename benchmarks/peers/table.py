"""From the speeds of each round to ratios and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

Row = Mapping[str, Any]

SUMMARY_HEAD = (
    "precision",
    "case",
    "engine",
    "tok/s",
    "of floor",
    "best peer",
    "its tok/s",
    "ratio",
    "commit",
)
ALL_HEAD = (
    "precision",
    "case",
    "engine",
    "tok/s",
    "GB/s",
    "of floor",
    "to it",
    "tokens as reference",
    "others",
)


def ratio(ours: Sequence[float], others: Sequence[float]) -> float:
    """The median over the rounds of our speed over theirs in the same round: above 1, ours is faster."""
    return median(mine / other for mine, other in zip(ours, others, strict=True))


def floor_share(engine: Row) -> float:
    """The rate at which a decode step at batch 1 reads its weights, over what memory allowed just before:
    median of the rounds. 1 is as fast as memory allows.
    """
    nbytes = engine["weight_bytes"]
    shares: list[float] = [s * nbytes / f for s, f in zip(engine["speeds"], engine["floors"], strict=True)]
    return median(shares)


def timed(row: Row) -> list[Row]:
    """The engines that ran all rounds."""
    return [engine for engine in row["engines"] if engine["speeds"] and engine["error"] is None]


def best_peer(row: Row) -> Row | None:
    """The engine of others with the highest median speed."""
    peers = [engine for engine in timed(row) if not engine["ours"]]
    return max(peers, key=lambda engine: median(engine["speeds"]), default=None)


def best_of_ours(row: Row) -> Row | None:
    """The fastest variant of Piecework."""
    ours = [engine for engine in timed(row) if engine["ours"]]
    return max(ours, key=lambda engine: median(engine["speeds"]), default=None)


def summary(rows: Sequence[Row]) -> list[list[str]]:
    """A line for each variant of Piecework and each case, beside the best peer: see `SUMMARY_HEAD`."""
    lines = []
    for row in rows:
        peer = best_peer(row)
        for engine in timed(row):
            if engine["ours"]:
                beside = ["-", "-", "-"]
                if peer is not None:
                    times = f"{ratio(engine['speeds'], peer['speeds']):.2f}"
                    beside = [peer["name"], _speed(peer), times]
                lines.append(
                    [
                        *_place(row),
                        engine["name"],
                        _speed(engine),
                        _share(row, engine),
                        *beside,
                        row["commit"],
                    ]
                )
    return lines


def everything(rows: Sequence[Row]) -> list[list[str]]:
    """A line for each engine and case: see `ALL_HEAD`; `to it` is our best variant's ratio to the engine."""
    lines = []
    for row in rows:
        best = best_of_ours(row)
        for engine in row["engines"]:
            name, agreement = engine["name"], engine["tokens_as_reference"]
            if engine not in timed(row):
                lines.append([*_place(row), name, *["-"] * 4, f"not timed: {engine['error']}", "-"])
                continue
            rate, share = "-", _share(row, engine)
            if share != "-":
                rate = f"{median(engine['speeds']) * engine['weight_bytes'] / 1e9:.1f}"
            against = "-" if best is None else f"{ratio(best['speeds'], engine['speeds']):.2f}"
            lines.append(
                [*_place(row), name, _speed(engine), rate, share, against, agreement, _others(engine)]
            )
    return lines


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table for a page."""
    texts = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in texts)


def _place(row: Row) -> list[str]:
    return [row["precision"], row["case"]]


def _others(engine: Row) -> str:
    known = [share for share in engine["others"] if share is not None]
    return f"{median(known):.0%}" if known else "-"


def _speed(engine: Row) -> str:
    value = median(engine["speeds"])
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _share(row: Row, engine: Row) -> str:
    """Only a decode step at batch 1 is bound by its weights."""
    return f"{floor_share(engine):.2f}" if row["case"] == "decode" else "-"
