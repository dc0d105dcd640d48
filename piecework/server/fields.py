"""Request fields outside of the ones that are built: which are ignored, and which are refused by name.

A field that could change the answer is never dropped in silence. `HARMLESS` fields change nothing of
the tokens (accounting, storage, speed hints). `UNBUILT` fields belong to the OpenAI, vLLM or SGLang
API and are refused, unless they carry the value that means "off". Anything else is not a field.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from piecework.errors import RequestError

HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

_OFF: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM and SGLang
    "add_special_tokens": (False,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "cache_salt": (),
    "chat_template": (),
    "documents": ([],),
    "ebnf": (),
    "echo": (False,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "json_schema": (),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "lora_path": (),
    "no_stop_trim": (False,),
    "priority": (0,),
    "prompt_embeds": (),
    "regex": (),
    "return_hidden_states": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "stop_regex": (),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
UNBUILT: Mapping[str, tuple[Any, ...]] = _OFF


def screen(values: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the `known` fields of a request body; raise RequestError for one that may not be ignored.

    A field that is null counts as absent.
    """
    given = {name: value for name, value in values.items() if value is not None}
    if "tools" in given and given.get("tool_choice") == "none":
        del given["tools"]
    _check_best_of(given)
    kept = {}
    for name, value in given.items():
        if name in known:
            kept[name] = value
        elif name in UNBUILT:
            if value not in UNBUILT[name]:
                raise _unsupported(name, UNBUILT[name])
        elif name not in HARMLESS:
            raise _unknown(name, known)
    return kept


def _check_best_of(given: dict[str, Any]) -> None:
    best_of, n = given.pop("best_of", None), given.get("n", 1)
    if best_of is not None and best_of != n:
        raise RequestError(
            f"best_of={best_of!r} is not allowed: only n={n!r} samples are made, so leave best_of out",
            param="best_of",
            code="unsupported_parameter",
        )


def _unsupported(name: str, off: tuple[Any, ...]) -> RequestError:
    allowed = "leave it out" + "".join(f", or send {value!r}" for value in off)
    if name == "tools":
        allowed += ", or add tool_choice='none'"
    message = f"{name} is not supported by this server yet: {allowed}"
    return RequestError(message, param=name, code="unsupported_parameter")


def _unknown(name: str, known: Collection[str]) -> RequestError:
    shown = name if len(name) <= 80 else name[:80] + "..."
    close = difflib.get_close_matches(name[:80], known, n=1)
    hint = f"; did you mean {close[0]}?" if close else "; known fields: " + ", ".join(sorted(known))
    message = f"{shown!r} is not a field of this request{hint}"
    return RequestError(message, param=shown, code="unknown_parameter")
