"""Conversion of rows of other people's files to groups: TRL's dataset types, HALOs' feedback files, and
helpers to add further formats.

A *format* is a function ``(rows, config) -> groups and drops``. Most formats look at one row at a time. To
add one, write ``(values, config) -> Group``, raise ``RowError(reason)`` for a row that cannot be used, and
decorate it with ``each_row``. Rows are read, never changed.
"""

from __future__ import annotations

import functools
import json
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from config.schema_data import DataConfig
from data.rows import Dropped, Row
from data.tool_calls import of_message, tools_of
from data.types import Completion, Group, Prompt, Turn

Values = Mapping[str, Any]
Format = Callable[[Iterable[Row], DataConfig], Iterator[Group | Dropped]]

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "ipython": "tool",
}
LARGEST = 3.4028234663852886e38
"""The largest finite number of float32."""
PAIR = (1.0, -1.0)
"""The rewards of a pair without scores, chosen first."""


class RowError(Exception):
    """A row that cannot become a group; the message is the reason that the data report shows."""


def each_row(convert: Callable[[Values, DataConfig], Group]) -> Format:
    """Return the format that converts row by row."""

    @functools.wraps(convert)
    def convert_all(rows: Iterable[Row], config: DataConfig) -> Iterator[Group | Dropped]:
        for row in rows:
            try:
                yield placed(with_tools(convert(row.values, config), row.values), row)
            except RowError as error:
                yield Dropped(row.file, row.number, str(error))

    return convert_all


def placed(group: Group, row: Row) -> Group:
    """Return the group with its place in the file, since a message may have to name it."""
    return replace(group, place=f"{row.file}, row {row.number}")


def with_tools(group: Group, values: Values) -> Group:
    """Return the group with the row's ``tools``, which the chat template describes to the model."""
    try:
        found = tools_of(values.get("tools"))
    except ValueError as error:
        raise RowError(str(error)) from error
    return replace(group, prompt=replace(group.prompt, tools=found)) if found else group


# Reading one value


def value(values: Values, column: str) -> Any:
    """Return ``values[column]``; raises RowError if it is missing or null."""
    found = values.get(column)
    if found is None:
        raise RowError(f"no {column!r}" if column in values else f"no column {column!r}")
    return found


def text(values: Values, column: str) -> str:
    """Return a string column; raises RowError for anything else."""
    found = value(values, column)
    if not isinstance(found, str):
        raise RowError(f"{column!r} is a {type(found).__name__}, not a string")
    return found


def number(values: Values, column: str) -> float:
    """Return a finite number; raises RowError for anything else."""
    found = value(values, column)
    if isinstance(found, bool) or not is_finite(found):
        raise RowError(f"{column!r} is {shown(found)}, not a finite number")
    return float(found)


def is_finite(found: Any) -> bool:
    """Return whether ``found`` is a number that is finite in float32, the precision of later computations."""
    return isinstance(found, int | float) and -LARGEST <= found <= LARGEST


def shown(found: Any) -> str:
    """Return a value as an error message quotes it, shortened because a file's value may be of any length."""
    return reprlib.repr(found)


def truth(values: Values, column: str) -> bool:
    """Return a boolean, or 0 or 1; raises RowError for anything else."""
    found = value(values, column)
    if found not in (True, False):
        raise RowError(f"{column!r} is {shown(found)}, not true or false")
    return bool(found)


def turns(found: Any, column: str) -> tuple[Turn, ...]:
    """Return chat messages ``[{role, content}, …]``, or ShareGPT's ``[{from, value}, …]``, as turns. A string
    becomes one user turn, and a single message a list of one."""
    if isinstance(found, str):
        return (Turn("user", found),)
    if isinstance(found, Mapping):
        found = [found]
    if not isinstance(found, list) or not found:
        raise RowError(f"{column!r} is neither a string nor a list of messages")
    calling = any(isinstance(message, Mapping) and message.get("tool_calls") for message in found)
    return tuple(_turn(message, column, calling) for message in found)


def keys_of(message: Values, column: str, calling: bool) -> str:
    """Return ``Turn.keys`` of a message; raises RowError."""
    try:
        return of_message(message, calling)
    except ValueError as error:
        raise RowError(f"in a message of {column!r} {error}") from error


def _turn(message: Any, column: str, calling: bool) -> Turn:
    """Return one message as a turn. ``calling`` says whether the conversation has tool calls."""
    if not isinstance(message, Mapping):
        raise RowError(f"a message of {column!r} is a {type(message).__name__}, not an object")
    said, content = message.get("role"), message.get("content")
    if "from" in message and said is None:
        said, content = message["from"], message.get("value")
    keys = keys_of(message, column, calling)
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise RowError(f"a message of {column!r} has no 'content' string")
    role = ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        raise RowError(f"a message of {column!r} has the role {shown(said)}")
    return Turn(role, content, keys)


def prompt_of(conversation: tuple[Turn, ...], reference: Any = None) -> Prompt:
    """Return a prompt; raises RowError unless the conversation ends with a user turn, or a tool's, that is
    not empty."""
    roles = [turn.role for turn in conversation]
    if roles[-1:] not in (["user"], ["tool"]) or "user" not in roles:
        raise RowError("the prompt does not end with a user turn")
    if not conversation[-1].content.strip():
        raise RowError("the prompt is empty")
    return Prompt(conversation, None if reference is None else str(reference))


def pair(prompt: Prompt, chosen: str | Completion, rejected: str | Completion) -> Group:
    """Return an offline pair; raises RowError if both answers are the same, because they then carry no
    preference."""
    if chosen == rejected:
        raise RowError("chosen and rejected are the same")
    return Group(prompt, (_completion(chosen), _completion(rejected)), PAIR)


def demonstration(prompt: Prompt, completion: str | Completion) -> Group:
    return Group(prompt, (_completion(completion),), (1.0,))


def _completion(found: str | Completion) -> Completion:
    return Completion(found) if isinstance(found, str) else found


def answered(head: tuple[Turn, ...], found: Any, column: str) -> tuple[tuple[Turn, ...], Completion]:
    """Return (conversation, answer) of a completion column.

    A string answers ``head``. Messages end with the assistant's answer. The messages before it either
    continue ``head`` or are the whole conversation again (as in the UltraFeedback sets), and then must
    contain the question that ``head`` ends with.
    """
    if isinstance(found, str):
        return head, Completion(found)
    messages = turns(found, column)
    if messages[-1].role != "assistant":
        raise RowError(f"{column!r} does not end with an assistant turn")
    if messages[-1].calls:
        raise RowError(f"{column!r} ends with a call of a tool and without an answer")
    before, answer = messages[:-1], Completion(messages[-1].content, keys=messages[-1].keys)
    if not before or before[0].role == "assistant":
        return head + before, answer
    if head and head[-1].content.strip() not in [
        turn.content.strip() for turn in before if turn.role == "user"
    ]:
        raise RowError(f"the conversation in {column!r} does not contain the prompt")
    return before, answer


# TRL's dataset types (huggingface.co/docs/trl/dataset_formats)


@each_row
def preference(values: Values, config: DataConfig) -> Group:
    """``prompt, chosen, rejected``, or ``chosen, rejected`` with the prompt as their common beginning;
    strings or messages."""
    chosen, rejected = value(values, "chosen"), value(values, "rejected")
    if "prompt" in values:
        head = turns(value(values, "prompt"), "prompt")
    elif isinstance(chosen, str) and isinstance(rejected, str):
        shared = common_beginning(chosen, rejected)
        head, chosen, rejected = turns(shared, "chosen"), chosen[len(shared) :], rejected[len(shared) :]
    else:
        head = ()
    asked, good = answered(head, chosen, "chosen")
    asked_too, bad = answered(head, rejected, "rejected")
    if asked != asked_too:
        raise RowError("chosen and rejected answer different conversations")
    return pair(prompt_of(asked, values.get("reference")), good, bad)


def common_beginning(one: str, other: str) -> str:
    """Return the implicit prompt of two strings: their common beginning, up to the end of a word.

    The space before the first differing word belongs to the completions (it is part of their first token).
    """
    length = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    while length > 0 and not (length == min(len(one), len(other)) or one[length].isspace()):
        length -= 1
    return one[:length]


@each_row
def prompt_completion(values: Values, config: DataConfig) -> Group:
    """``prompt, completion``, or ``messages`` that end with the answer. The result is a demonstration."""
    if "completion" in values:
        conversation, answer = answered(
            turns(value(values, "prompt"), "prompt"), value(values, "completion"), "completion"
        )
    else:
        conversation, answer = answered((), value(values, "messages"), "messages")
    return demonstration(prompt_of(conversation, values.get("reference")), answer)


@each_row
def unpaired(values: Values, config: DataConfig) -> Group:
    """``prompt, completion, label`` (true: desirable)."""
    conversation, answer = answered(
        turns(value(values, "prompt"), "prompt"), value(values, "completion"), "completion"
    )
    reward = 1.0 if truth(values, "label") else -1.0
    return Group(prompt_of(conversation, values.get("reference")), (answer,), (reward,))


@each_row
def prompt_only(values: Values, config: DataConfig) -> Group:
    """``prompt``, and ``reference`` if answers can be checked. Every other column is kept for reward
    functions."""
    prompt = prompt_of(turns(value(values, "prompt"), "prompt"), values.get("reference"))
    return Group(replace(prompt, columns=other_columns(values, config)))


def other_columns(values: Values, config: DataConfig) -> str:
    """Return the columns of a row that are neither its prompt nor its reference, as a JSON object; "" if it
    has none."""
    renamed = config.columns or {}
    taken = {"prompt", "reference", "tools", *renamed, *renamed.values()}
    # dict() copies without marking them as read: that is for what decides
    rest = {name: found for name, found in dict(values).items() if name not in taken}
    text = json.dumps(rest, ensure_ascii=False, default=str) if rest else ""
    if "NaN" in text or "Infinity" in text:  # no JSON: null
        return json.dumps(json.loads(text, parse_constant=lambda _: None), ensure_ascii=False)
    return text


# HALOs' feedback files


@dataclass
class _Samples:
    prompt: Prompt
    completions: list[Completion] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)


def feedback(rows: Iterable[Row], config: DataConfig) -> Iterator[Group | Dropped]:
    """HALOs' feedback JSON.

    ``type`` says what a row is: ``binary_feedback`` (prompt, output, label), ``pairwise_feedback`` (prompt,
    output_A, output_B, label: 1 when A is better) or ``scalar_feedback`` (prompt, output, reward), whose rows
    are gathered into one group per prompt. Outputs are strings or messages.
    """
    scored: dict[str, _Samples] = {}
    for row in rows:
        try:
            kind = text(row.values, "type")
            prompt = prompt_of(turns(value(row.values, "prompt"), "prompt"), row.values.get("reference"))
            prompt = with_tools(Group(prompt), row.values).prompt
            if kind == "binary_feedback":
                reward = 1.0 if truth(row.values, "label") else -1.0
                yield Group(prompt, (_output(row.values, "output"),), (reward,))
            elif kind == "pairwise_feedback":
                outputs = _output(row.values, "output_A"), _output(row.values, "output_B")
                yield pair(prompt, *(outputs if truth(row.values, "label") else outputs[::-1]))
            elif kind == "scalar_feedback":
                output, reward = _output(row.values, "output"), number(row.values, "reward")
                samples = scored.setdefault(prompt.id, _Samples(prompt))
                samples.completions.append(output)
                samples.rewards.append(reward)
            else:
                raise RowError(
                    f"the type {shown(kind)} is not binary_feedback, pairwise_feedback or scalar_feedback"
                )
        except RowError as error:
            yield Dropped(row.file, row.number, str(error))
    for samples in scored.values():
        yield Group(samples.prompt, tuple(samples.completions), tuple(samples.rewards))


def _output(values: Values, column: str) -> Completion:
    return answered((), value(values, column), column)[1]
