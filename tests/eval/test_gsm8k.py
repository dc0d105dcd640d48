"""`eval gsm8k`: prompts, the number of an answer, and equal answers wherever a model runs."""

from __future__ import annotations

import json
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from piecework.cli.main import main
from piecework.config import EngineConfig
from piecework.engine.service import Service
from piecework.errors import ConfigError
from piecework.eval.gsm8k import answer_value, read_questions
from piecework.eval.options import Gsm8kOptions
from piecework.eval.run_gsm8k import Answer, ask_service, score


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("She has 16 - 7 = 9.\n#### 9", "9"),
        ("#### 1,234,567", "1234567"),
        ("#### -5", "-5"),
        ("#### $18.50 each, of 3", "18.50"),
        ("She has <<2+2=4>>4 eggs, 5 left", "5"),  # no mark: the last number
        ("It costs $2,000.", "2000"),
        ("#### unknown, perhaps 7", "7"),
        ("12 eggs\n#### none", "12"),
        ("Thus 2.50", "2.5"),
        ("no number", None),
        ("", None),
    ],
)
def test_the_number_of_an_answer(text: str, value: str | None) -> None:
    assert answer_value(text) == (None if value is None else Decimal(value))


def test_prompts_hold_examples_that_are_not_asked(questions: Path) -> None:
    asked = read_questions(Gsm8kOptions(data=str(questions), num_shots=2))
    assert [int(q.answer) for q in asked] == [19, 12, 9, 25, 6]
    assert asked[0].prompt == (
        "Question: What is 2 and 3?\nAnswer: 2+3=5\n#### 5\n\n"
        "Question: What is 7 and 4?\nAnswer: 7+4=11\n#### 11\n\n"
        "Question: What is 10 and 9?\nAnswer:"
    )


def test_examples_of_another_file(questions: Path, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "One?", "answer": "#### 1"}')
    asked = read_questions(
        Gsm8kOptions(data=str(questions), train=str(tmp_path / "train.jsonl"), num_shots=1, num_questions=7)
    )
    assert len(asked) == 7
    assert asked[0].prompt == "Question: One?\nAnswer: #### 1\n\nQuestion: What is 2 and 3?\nAnswer:"


def test_more_than_the_file_has_is_refused(questions: Path) -> None:
    with pytest.raises(ConfigError, match=r"num_questions=6 is not allowed: 1 to 5"):
        read_questions(Gsm8kOptions(data=str(questions), num_shots=2, num_questions=6))
    with pytest.raises(ConfigError, match=r"num_shots=7 is not allowed: less than 7"):
        read_questions(Gsm8kOptions(data=str(questions), num_shots=7))
    with pytest.raises(ConfigError, match=r"num_shots=9 is not allowed: at most 7"):
        read_questions(Gsm8kOptions(data=str(questions), num_shots=9))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{not json", "it is not JSON"),
        ("[" * 100_000, "it is not JSON (it is nested too deeply)"),
        ("[1, 2]", "it holds a list, not an object"),
        ('{"question": "q", "answer": 5}', "'answer' is 5, and has to be a text"),
        ('{"answer": "#### 5"}', "'question' is None, and has to be a text"),
        ('{"question": "q", "answer": "five"}', "its answer holds no number"),
    ],
)
def test_a_malformed_line_is_refused_by_its_number(
    line: str, why: str, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "bad.jsonl"
    first, *others = questions.read_text().splitlines()
    data.write_text("\n".join([first, "", line, *others]))
    assert main(["eval", "gsm8k", "--data", str(data)]) == 2
    message = capsys.readouterr().err
    assert f"data='{data}' is not allowed: line 3 cannot be used: {why}" in message


def test_shares_of_right_invalid_and_cut_answers(questions: Path) -> None:
    options = Gsm8kOptions(data=str(questions), num_shots=3)
    asked = read_questions(options)
    answers = [
        Answer("#### 12.0", 5, 4, "stop"),
        Answer("8 or 7", 5, 4, "length"),
        Answer("none", 5, 4, "length"),
        Answer(error="HTTP 500"),
    ]
    report = score(asked, answers, 2.0, options)
    assert (report["accuracy"], report["invalid"], report["cut"]) == (0.25, 0.5, 0.5)
    assert (report["failed"], report["errors"]) == (1, {"HTTP 500": 1})
    assert report["output_throughput"] == 6.0
    assert [a["right"] for a in report["answers"]] == [True, False, False, False]


def ask(tiny: Path, questions: Path, parallel: int, **settings: Any) -> tuple[dict[str, Any], int, int]:
    """The report, the replays that gave it, and the most requests that were open at once."""
    options = Gsm8kOptions(data=str(questions), num_shots=1, max_tokens=12, parallel=parallel)
    config = EngineConfig.from_flat({"model": str(tiny), "dtype": "float32", "threads": 1, **settings})
    with closing(Service(config)) as service:
        submit, opened, closed, most = service.submit, 0, 0, 0

        def count_opened(*args: Any, **kwargs: Any) -> str:
            nonlocal opened, most
            opened += 1
            most = max(most, opened - closed)
            return submit(*args, **kwargs)

        def count_closed() -> None:
            nonlocal closed
            closed += 1

        service.submit = count_opened  # type: ignore[method-assign]
        report = ask_service(service, read_questions(options), options, count_closed)
        assert closed == opened == 6
        return report, service.graph_counters()["body"]["replays"], most


def test_answers_are_equal_eager_and_captured(tiny: Path, questions: Path) -> None:
    eager, replays, most = ask(tiny, questions, 6, compilation_config={"compiler": "eager"})
    assert (replays, most) == (0, 6) and eager["num_questions"] == 6 and eager["failed"] == 0
    captured = {
        "compiler": "eager",
        "decode_graph": "piecewise",
        "prefill_graph": "piecewise",
        "decode_capture_sizes": [1, 4, 8],
        "prefill_capture_sizes": [64, 256],
    }
    simulated, replays, _ = ask(tiny, questions, 6, device="sim", compilation_config=captured)
    assert replays > 0
    texts = [[answer["text"] for answer in report["answers"]] for report in (eager, simulated)]
    assert texts[0] == texts[1] and all(texts[0])


def test_no_more_run_at_once_than_was_said(tiny: Path, questions: Path) -> None:
    _, _, most = ask(tiny, questions, 2, compilation_config={"compiler": "eager"})
    assert most == 2


def test_the_command_prints_a_block(tiny: Path, questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--data", str(questions), "--num-shots", "1", "--max-tokens", "4", "--compiler", "eager"]
    assert main(["eval", "gsm8k", "--model", str(tiny), "--num-questions", "2", *flags]) == 0
    printed = capsys.readouterr().out
    for line in ("Accuracy:", "Invalid:", "Latency (s):", "Output throughput (tok/s):", "float32 on cpu."):
        assert line in printed


def test_a_prompt_that_does_not_fit_is_refused(
    tiny: Path, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data", str(questions), "--num-shots", "1", "--max-tokens", "250", "--compiler", "eager"]
    assert main(["eval", "gsm8k", "--model", str(tiny), *flags]) == 2
    assert "max_tokens=250 is not allowed: the prompt has" in capsys.readouterr().err


def test_engine_flags_are_refused_for_a_server(questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = ["--base-url", "http://127.0.0.1:9"]
    assert main(["eval", "gsm8k", "--data", str(questions), *url, "--dtype", "float32"]) == 2
    assert "--dtype cannot be set on the server" in capsys.readouterr().err
    assert main(["eval", "gsm8k", "--data", str(questions), *url]) == 2
    assert "a server that lists its models" in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_gives_the_answers_of_this_process(
    tiny: Path, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from piecework.bench.own_server import own_server

    flags = ["--data", str(questions), "--num-shots", "1", "--max-tokens", "12", "--json"]
    engine = {"model": str(tiny), "dtype": "float32", "threads": 1}
    with own_server(engine, None) as url:
        assert main(["eval", "gsm8k", *flags, "--base-url", url]) == 0
        remote = json.loads(capsys.readouterr().out)
        assert main(["eval", "gsm8k", *flags, "--base-url", url, "--model", "unknown"]) == 1
        failed = json.loads(capsys.readouterr().out)
    assert main(["eval", "gsm8k", *flags, "--model", str(tiny), "--dtype", "float32"]) == 0
    here = json.loads(capsys.readouterr().out)
    assert remote["answers"] == here["answers"]
    assert remote["total_output_tokens"] == here["total_output_tokens"] > 0
    assert failed["failed"] == 6 and failed["invalid"] == 1.0
    assert next(iter(failed["errors"])).startswith("HTTP 404")
