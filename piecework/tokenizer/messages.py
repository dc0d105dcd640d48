"""Messages, tools and variables for chat templates: checked, and rebuilt of plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from piecework.errors import RequestError

_SHOWN = 80  # characters of a bad value in a message


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as templates expect them: plain data, text contents as one string, no None.

    Raises:
        RequestError: names what is wrong, for example `messages[2].content[1].type`.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise _refuse("messages", messages, "a list with at least one message")
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def read_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return tools, which are JSON schemas, as plain data. Raises RequestError naming the tool."""
    if tools is None:
        return None
    if not isinstance(tools, list | tuple):
        raise _refuse("tools", tools, "a list of JSON schemas")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise _refuse(f"tools[{i}]", tool, "a JSON schema, as an object")
    plain: list[dict[str, Any]] = _plain("tools", tools)
    return plain


def read_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return a template's further variables as plain data. Raises RequestError naming the variable."""
    return {name: _plain(name, value) for name, value in variables.items()}


def _message(at: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _refuse(at, message, "an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _refuse(f"{at}.role", role, "a non-empty string such as system, user or assistant")
    # Templates take a missing key well, and many write None out as text.
    plain = {
        key: _plain(f"{at}.{key}", value)
        for key, value in message.items()
        if value is not None and key != "content"
    }
    content = message.get("content")
    if content is not None:
        plain["content"] = _content(f"{at}.content", content)
    elif role != "assistant":
        raise _refuse(f"{at}.content", content, "a string or a list of text parts")
    return plain


def _content(at: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise _refuse(at, content, "a string or a list of text parts")
    return "".join(_part(f"{at}[{i}]", part) for i, part in enumerate(content))


def _part(at: str, part: Any) -> str:
    if not isinstance(part, Mapping):
        raise _refuse(at, part, "an object {'type': 'text', 'text': ...}")
    if part.get("type") != "text":
        raise _refuse(f"{at}.type", part.get("type"), "'text', since this model takes text only")
    text = part.get("text")
    if not isinstance(text, str):
        raise _refuse(f"{at}.text", text, "a string")
    return text


def _plain(at: str, value: Any) -> Any:
    """Copy JSON-like data. Other objects could have methods that lead out of the template's sandbox."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(f"{at}.{key}", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(f"{at}[{i}]", item) for i, item in enumerate(value)]
    raise _refuse(at, value, "JSON data: strings, numbers, booleans, null, lists, objects with string keys")


def _refuse(param: str, value: Any, allowed: str) -> RequestError:
    shown = repr(value)
    if len(shown) > _SHOWN:
        shown = shown[:_SHOWN] + "..."
    return RequestError(f"{param}={shown} is not allowed: {allowed}", param=param)
