"""Tool calls in conversations, in OpenAI's form: an assistant's message with ``tool_calls``, answered by
messages with the role ``tool``.

A turn keeps the message's keys for tool calls, in addition to role and content, as canonical JSON, as the
chat template receives them. Arguments given as a JSON text are parsed, because templates serialise them
themselves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jinja2

from data.json_values import parsed
from data.types import Turn

_NAME = "humanline_probe_call"
OF_A_RESULT = ("name", "tool_call_id")
"""Keys by which a tool's message may refer to the call that it answers."""


def of_message(message: Mapping[str, Any]) -> str:
    """Return a message's information about tool calls as JSON; "" if it has none. Raises ValueError for
    malformed calls."""
    found: dict[str, Any] = {}
    if message.get("tool_calls"):
        found["tool_calls"] = [_call(call) for call in _list(message["tool_calls"])]
    elif message.get("role") == "tool":
        found |= {key: message[key] for key in OF_A_RESULT if isinstance(message.get(key), str)}
    return json.dumps(found, sort_keys=True, ensure_ascii=False) if found else ""


def _list(calls: Any) -> list[Any]:
    if not isinstance(calls, list):
        raise ValueError(f"'tool_calls' is a {type(calls).__name__}, not a list")
    return calls


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError("one of 'tool_calls' has no 'function' with a 'name'")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _parsed(arguments, function["name"])
    if not isinstance(arguments, Mapping):
        raise ValueError(f"the arguments of a call of {function['name']} are no object")
    known = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {
        **known,
        "type": "function",
        "function": {"name": function["name"], "arguments": dict(arguments)},
    }


def _parsed(text: str, name: str) -> Any:
    """Return the arguments of a call of ``name``, which a file's own check sees only as a text. Raises
    ValueError."""
    text = text.strip(" \t\n\r")
    try:
        value, end, fault = parsed(text, 0)
    except ValueError as error:
        raise ValueError(f"the arguments of a call of {name} are no JSON") from error
    if end < len(text):
        raise ValueError(f"the arguments of a call of {name} are no JSON")
    if fault is not None:
        raise ValueError(f"the arguments of a call of {name} cannot be used: {fault}")
    return value


def writes_calls(apply: Callable[[Iterable[Turn]], str]) -> bool:
    """Return whether a chat template writes an assistant's calls; many templates omit them silently."""
    call = {"id": "abcdefghi", "function": {"name": _NAME, "arguments": {"a": 1}}}
    turns = [
        Turn("user", "a"),
        Turn("assistant", "", of_message({"tool_calls": [call]})),
        Turn("tool", "b", of_message({"role": "tool", "name": _NAME, "tool_call_id": "abcdefghi"})),
    ]
    try:
        return apply(turns).count(_NAME) > apply([turns[0], Turn("assistant", ""), turns[2]]).count(_NAME)
    except (jinja2.TemplateError, TypeError):
        return False
