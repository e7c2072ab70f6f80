"""What chat templates read of a conversation besides roles and contents: tools, calls of them, thoughts.

Calls have OpenAI's form: an assistant's message with ``tool_calls``, answered by messages with the role
``tool``. A turn keeps these keys of its message as JSON, in the row's own order, as the chat
template receives them. Arguments given as a JSON text are parsed, because templates serialise them
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
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys under which an assistant's message may have what was thought before its content."""


def of_message(message: Mapping[str, Any], calling: bool = True) -> str:
    """Return a message's ``Turn.keys``. ``calling`` says whether the conversation has tool calls. Raises
    ValueError for malformed calls."""
    fields = {key: message[key] for key in THOUGHTS if message.get(key)}
    for key, said in fields.items():
        if not isinstance(said, str):
            raise ValueError(f"{key!r} is a {type(said).__name__}, not a string")
    if calling and message.get("tool_calls"):
        fields["tool_calls"] = [_call(call) for call in _list(message["tool_calls"])]
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


def writes_calls(apply: Callable[[Iterable[Turn]], str], mark: str) -> tuple[bool, bool]:
    """Return whether a chat template writes an assistant's calls, and whether it writes the result of one,
    ``mark``; many templates omit them silently."""
    call = {"id": "abcdefghi", "function": {"name": _NAME, "arguments": {"a": 1}}}
    result = of_message({"role": "tool", "name": _NAME, "tool_call_id": call["id"]})
    texts = []
    for keys in (of_message({"tool_calls": [call]}), ""):
        try:
            texts.append(apply([Turn("user", "a"), Turn("assistant", "", keys), Turn("tool", mark, result)]))
        except jinja2.TemplateError:  # some refuse a result without its call
            texts.append("")
    return texts[0].count(_NAME) > texts[1].count(_NAME), mark in texts[0]
