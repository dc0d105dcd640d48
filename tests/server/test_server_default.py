"""The default model behind the server answers a question."""

from __future__ import annotations

from pathlib import Path

import pytest
from server_process import ServerProcess

from piecework.errors import ModelError
from piecework.weights.source import resolve

MODEL = "smollm2-135m"


@pytest.mark.slow
def test_the_default_model_knows_the_capital_of_japan(tmp_path: Path) -> None:
    try:
        resolve(MODEL)
    except ModelError as error:
        pytest.skip(f"the default model cannot be had here: {error}")
    messages = [{"role": "user", "content": "What is the capital of Japan?"}]
    with ServerProcess(MODEL, log=tmp_path / "log") as server:
        create = server.openai.chat.completions.create
        whole = create(model=MODEL, messages=messages, temperature=0, max_tokens=40)  # type: ignore[arg-type]
        choice = whole.choices[0]
        assert "Tokyo" in choice.message.content and choice.finish_reason == "stop"
        assert not choice.message.content.startswith(" ") and "<|" not in choice.message.content
        pieces = create(model=MODEL, messages=messages, temperature=0, max_tokens=40, stream=True)  # type: ignore[call-overload]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
        assert text == choice.message.content
