"""What chat templates read of a conversation besides roles and contents: tools, calls of them, thoughts.

Calls have OpenAI's form: an assistant's message with ``tool_calls``, answered by messages with the role
``tool``. A turn keeps these keys of its message as JSON, in the row's own order, as the chat
template receives them. Arguments given as a JSON text are parsed, because templates serialise them
themselves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from data.json_values import parsed

OF_A_RESULT = ("name", "tool_call_id")
"""Keys by which a tool's message may refer to the call that it answers."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys under which an assistant's message may have what was thought before its content."""


def of_message(message: Mapping[str, Any], calling: bool = True) -> str:
    """Return a message's ``Turn.keys``. ``calling`` says whether the conversation has tool calls. Raises
    ValueError for malformed calls."""
    fields = {key: message[key] for key in THOUGHTS if message.get(key)}
    for key, thought in fields.items():
        if not isinstance(thought, str):
            raise ValueError(f"{key!r} is a {type(thought).__name__}, not a string")
    if calling and message.get("tool_calls"):
        if not isinstance(calls := message["tool_calls"], list):
            raise ValueError(f"'tool_calls' is a {type(calls).__name__}, not a list")
        fields["tool_calls"] = [_call(call) for call in calls]
    elif calling and message.get("role") == "tool":
        fields |= {key: message[key] for key in OF_A_RESULT if isinstance(message.get(key), str)}
    return json.dumps(fields, ensure_ascii=False, default=str) if fields else ""


def tools_of(tools: Any) -> str:
    """Return a row's ``tools``, a list of functions' JSON schemas or its JSON text, as ``Prompt.tools``.
    Raises ValueError."""
    if isinstance(tools, str) and tools.strip():
        tools, end, fault = parsed(text := tools.strip(), 0)
        if fault or end < len(text):
            raise ValueError(f"'tools' cannot be used: {fault or 'text follows its JSON'}")
    if not tools:
        return ""
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError("'tools' is not a list of functions' JSON schemas, or its JSON text")
    return json.dumps(tools, ensure_ascii=False, default=str)


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError("one of 'tool_calls' has no 'function' with a 'name'")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _parsed(arguments, function["name"])
    if not isinstance(arguments, Mapping):
        raise ValueError(f"the arguments of a call of {function['name']} are no object")
    return dict(call) | {"function": dict(function) | {"arguments": dict(arguments)}}


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
