"""Chat messages as clients send them, checked and brought to the form that chat templates expect."""

from __future__ import annotations

import json
from typing import Any

from piecework.errors import RequestError
from piecework.server.reading import shorten
from piecework.tokenizer.messages import read_messages

ROLES = {
    "system": "system",
    "developer": "system",  # OpenAI's newer name; templates know the older one
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_PASSED = ("name", "tool_call_id", "reasoning_content")
_IGNORED = frozenset({"annotations", "refusal", "audio", "function_call"})
"""What the API puts into an assistant's message and clients send back; it has no place in a prompt."""


def normalise(messages: list[Any]) -> list[dict[str, Any]]:
    """Check messages and return them with plain string contents.

    Raises RequestError with a `param` such as `messages[1].content[0].type`.
    """
    return read_messages([_message(f"messages[{i}]", message) for i, message in enumerate(messages)])


def _message(at: str, message: Any) -> dict[str, Any]:
    """Check what the API prescribes; contents are checked where they are read for the template."""
    if not isinstance(message, dict):
        raise _refuse(at, message, "an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _refuse(f"{at}.role", role, "one of " + ", ".join(ROLES))
    found: dict[str, Any] = {"role": ROLES[role], "content": message.get("content")}
    calls = message.get("tool_calls")
    if calls:
        found["tool_calls"] = _tool_calls(f"{at}.tool_calls", calls)
    if found["content"] is None and not (role == "assistant" and calls):
        raise _refuse(f"{at}.content", None, "a string or a list of text parts")
    for name, value in message.items():
        if value is None or name in ("role", "content", "tool_calls") or name in _IGNORED:
            continue
        if name not in _PASSED:
            known = ", ".join(("role", "content", "tool_calls", *_PASSED))
            raise _refuse(f"{at}.{name[:40]}", value, f"no field of a message; known fields: {known}")
        if not isinstance(value, str):
            raise _refuse(f"{at}.{name}", value, "a string")
        found[name] = value
    return found


def _tool_calls(at: str, calls: Any) -> list[dict[str, Any]]:
    """Check the calls of an earlier turn; templates want the arguments as an object, not as its text."""
    if not isinstance(calls, list):
        raise _refuse(at, calls, "a list of tool calls")
    found = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _refuse(f"{at}[{i}]", call, "an object with a function that has a name and arguments")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                arguments = None
        if not isinstance(arguments, dict):
            path = f"{at}[{i}].function.arguments"
            raise _refuse(path, function.get("arguments"), "a JSON object as text")
        found.append({**call, "function": {"name": function["name"], "arguments": arguments}})
    return found


def _refuse(param: str, value: Any, allowed: str) -> RequestError:
    return RequestError(f"{param}={shorten(value)} is not allowed: {allowed}", param=param)
