"""The texts that a calibration reads: a text file, or lines of JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from piecework.errors import ConfigError
from piecework.json_text import numbered_lines, parse_json

FORMS = (
    "a .jsonl file whose lines have question and answer, text, prompt or messages, "
    "or a text file (paragraphs, with a blank line between)"
)


def read_texts(path: str | Path) -> list[str]:
    """Read the texts of a file, see `FORMS`; ConfigError where it has none or a line isn't one."""
    file = Path(path).expanduser()
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("calibration", str(path), f"a readable file ({error}): {FORMS}") from error
    if file.suffix in (".jsonl", ".json"):
        texts = [_text_of(line, f"{file}:{number}") for number, line in numbered_lines(content)]
    else:
        texts = [part.strip() for part in content.split("\n\n")]
    texts = [text for text in texts if text]
    if not texts:
        raise ConfigError("calibration", str(path), f"a file with at least one text: {FORMS}")
    return texts


def _text_of(line: str, where: str) -> str:
    try:
        value: Any = parse_json(line)
    except ValueError as error:
        raise ConfigError("calibration", where, f"a JSON object ({error})") from error
    if isinstance(value, dict):
        if isinstance(value.get("messages"), list):
            parts = [message.get("content") for message in value["messages"] if isinstance(message, dict)]
        elif "question" in value:
            parts = [value.get("question"), value.get("answer", "")]
        else:
            parts = [value.get("text", value.get("prompt"))]
        texts = [part for part in parts if isinstance(part, str)]
        if texts and len(texts) == len(parts):
            return "\n".join(texts)
    raise ConfigError("calibration", where, f"a line of {FORMS}")
