"""`bench growth`: its tables on tiny models, and what is made of their figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import save_tiny

from piecework.bench.growth import count_rows, run_growth, with_growth
from piecework.bench.growth_report import growth_tables
from piecework.bench.growth_steps import PARTS
from piecework.bench.options import GrowthOptions
from piecework.errors import ConfigError

SMALL = GrowthOptions(
    batch_sizes="1,3",
    contexts="40,80",
    context_batches="1,2",
    layers="2,4",
    queue="5,20",
    running=8,
    input_len=5,
    steps=3,
    verify=2,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("llama"), "llama", tokenizer=True)


def test_every_table_has_its_rows_and_their_parts(folder: Path) -> None:
    done: list[None] = []
    settings = {"model": str(folder), "dtype": "float32", "threads": 1}
    report = run_growth(settings, SMALL, lambda: done.append(None))
    assert (report["outputs_equal"], report["outputs_compared"]) == (6, 6)
    cases = report["cases"]
    assert [row["batch"] for row in cases["batch"]] == [1, 3]
    shapes = [(row["batch"], row["context"]) for row in cases["context"]]
    assert shapes == [(1, 40), (1, 80), (2, 40), (2, 80)]
    assert [row["layers"] for row in cases["layers"]] == [2, 4]
    assert [(row["queue"], row["running"]) for row in cases["queue"]] == [(5, 8), (20, 8)]
    rows = [row for found in cases.values() for row in found]
    assert len(rows) == len(done) == count_rows(SMALL) == 10
    for row in rows:
        assert all(row[f"{part}_ms"] > 0 for part in ("step", *PARTS, "rest")), row
        assert row["schedule_share"] == pytest.approx(row["schedule_ms"] / row["step_ms"])
    assert all(row["growth"] is None for found in cases.values() for row in found[:1])
    assert cases["context"][2]["growth"] is None and cases["context"][3]["growth"]["step_ms"] > 0
    assert {"add_us", "abort_waiting_us", "abort_running_us"} < set(cases["queue"][1]["growth"])
    text = growth_tables(report)
    assert text.endswith("quantisation none, weights not repacked. Tokens: 6 of 6 equal to the output alone.")
    assert [line.split(":")[0] for line in text.splitlines() if ": a step" in line] == [
        "Batch",
        "Context",
        "Layers",
        "Queue",
    ]
    assert list(cases) == ["batch", "context", "layers", "queue"]


def test_growth_is_told_per_doubling() -> None:
    rows = [{"queue": 10, "step_ms": 1.0}, {"queue": 40, "step_ms": 9.0}, {"queue": 80, "step_ms": 9.0}]
    factors = [row["growth"] and row["growth"]["step_ms"] for row in with_growth("queue", rows)]
    assert factors == [None, pytest.approx(3.0), pytest.approx(1.0)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cases": "batch,depth"}, "cases='batch,depth' is not allowed: each once of batch, context"),
        ({"cases": "batch,batch"}, "each once of"),
        ({"queue": "10,-1"}, "queue='10,-1' is not allowed: positive integers"),
        ({"steps": 0}, "steps=0 is not allowed"),
    ],
)
def test_what_no_table_can_have_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GrowthOptions(**given)  # type: ignore[arg-type]
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("options", "settings", "said"),
    [
        ({"cases": "context", "contexts": "512"}, {}, "contexts=512 is not allowed: from 19 (steps) to 256"),
        ({"cases": "batch", "batch_sizes": "5"}, {"max_num_seqs": 4}, "max_num_seqs=4 is not allowed"),
        ({"cases": "batch", "batch_sizes": "5"}, {"num_pages": 5}, "num_pages=5 is not allowed"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    folder: Path, options: dict[str, str], settings: dict[str, int], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        chosen = {"model": str(folder), "dtype": "float32", "threads": 1, **settings}
        run_growth(chosen, GrowthOptions(**options, verify=1))  # type: ignore[arg-type]
    assert said in str(caught.value)
