"""Conversion of rows of other people's files to groups: TRL's dataset types, HALOs' feedback files, and
helpers to add further formats.

A *format* is a function ``(rows, config) -> groups and drops``. Most formats look at one row at a time. To
add one, write ``(values, config) -> Group``, raise ``RowError(reason)`` for a row that cannot be used, and
decorate it with ``each_row``. Rows are read, never changed.
"""

from __future__ import annotations

import functools
import json
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from config.schema_data import DataConfig
from data.columns import READ, Values, named, two_answers
from data.json_values import are_finite, choices, is_empty, parsed, unpacked
from data.markup import answer_at, common_beginning
from data.rows import Dropped, LeftOutError, Row, RowError
from data.types import MARKS, THOUGHTS, Completion, Group, Prompt, Turn, of_message, split_system, tools_of

Format = Callable[[Iterable[Row], DataConfig], Iterator[Group | Dropped]]
Sample = tuple[Prompt, Completion, float]
"""A prompt, one answer, its reward."""

_NAMES = {
    "system": "system developer",
    "user": "user human prompter",
    "assistant": "assistant gpt chatgpt model",
    "tool": "tool ipython",
}
ROLES = {name: role for role, names in _NAMES.items() for name in names.split()}
"""Who says a message -> the role here."""
PAIR = (1.0, -1.0)
"""The rewards of a pair without scores, chosen first."""


def each_row(convert: Callable[[Values, DataConfig], Group | list[Group] | Sample]) -> Format:
    """Return the format that converts row by row; a row may become several groups. Samples are gathered into
    one group per prompt, at the end."""

    @functools.wraps(convert)
    def convert_all(rows: Iterable[Row], config: DataConfig) -> Iterator[Group | Dropped]:
        samples: dict[str, list[Sample]] = {}
        for row in rows:
            try:
                converted = convert(row.values, config)
                if isinstance(converted, tuple):
                    prompt = with_tools(Group(converted[0]), row.values).prompt
                    samples.setdefault(prompt.id, []).append((prompt, *converted[1:]))
                    continue
                groups = converted if isinstance(converted, list) else [converted]
                yield from [placed(with_tools(group, row.values), row) for group in groups]
            except RowError as error:
                yield error.dropped(row)
        for of_prompt in samples.values():
            prompts, answers, rewards = zip(*of_prompt, strict=True)
            yield Group(prompts[0], answers, rewards)

    return convert_all


def placed(group: Group, row: Row) -> Group:
    """Return the group with its place in the file, since a message may have to name it."""
    return replace(group, place=f"{row.file}, row {row.number}")


def with_tools(group: Group, values: Values) -> Group:
    """Return the group with the ``tools`` of the row or of its conversation, which the chat template
    describes to the model."""
    if is_empty(tools := values.get("tools")):
        objects = map(conversation_object, dict(values).values())  # dict() marks nothing as read
        tools = next((one["tools"] for one in objects if one and one.get("tools")), None)
    try:
        tools = tools_of(tools)
    except ValueError as error:
        raise RowError(str(error)) from error
    return replace(group, prompt=replace(group.prompt, tools=tools)) if tools else group


# Reading one value


def value(values: Values, column: str) -> Any:
    """Return ``values[column]``; raises RowError if it is missing, null or NaN."""
    cell = values.get(column)
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        raise RowError(f"no {column!r}" if column in values else f"no column {column!r}")
    return cell


def text(values: Values, column: str) -> str:
    """Return a string column; raises RowError for anything else."""
    cell = value(values, column)
    if not isinstance(cell, str):
        raise RowError(f"{column!r} is a {type(cell).__name__}, not a string")
    return cell


def number(values: Values, column: str) -> float:
    """Return a finite number, which a table of texts (csv) writes as one; raises RowError for anything
    else."""
    cell = value(values, column)
    try:
        converted: Any = float(cell) if isinstance(cell, str) else cell
    except ValueError:
        converted = None
    if isinstance(converted, bool) or not are_finite([converted]):
        raise RowError(f"{column!r} is {shown(cell)}, not a finite number")
    return float(converted)


shown = reprlib.repr
"""A value as an error message quotes it, shortened because a file's value may be of any length."""

_TRUTHS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False, "-1": False}


def truth(values: Values, column: str) -> bool:
    """Return a boolean, 0 or 1 (also −1 for false), or the text of one; raises RowError for anything else."""
    cell = value(values, column)
    found = _TRUTHS.get(str(cell).strip().lower()) if isinstance(cell, bool | int | float | str) else None
    if found is None:
        raise RowError(f"{column!r} is {shown(cell)}, not true or false: write true and false, or 1 and 0")
    return found


def listed(values: Values, column: str) -> list[Any]:
    """Return a list, which a table of texts (csv) writes as JSON; raises RowError for anything else."""
    entries = unpacked(value(values, column))
    if not isinstance(entries, list):
        raise RowError(f"{column!r} is a {type(entries).__name__}, not a list")
    return entries


_IS_MESSAGE = re.compile(r"""\s*\[?\s*\{\s*["'](role|from|content|value)["']\s*:""")


def conversation_object(cell: Any) -> Mapping[str, Any] | None:
    """Return the object with ``messages`` that a value is, or holds as JSON; None for another value."""
    found = unpacked(cell) if isinstance(cell, str) and "messages" in cell else cell
    return found if isinstance(found, Mapping) and isinstance(found.get("messages"), list) else None


def messages_in(cell: Any, column: str) -> Any:
    """Return the messages that a value holds, also as the text of JSON; another value as it is. JSON of
    anything else is a text."""
    if (whole := conversation_object(cell)) is not None:
        return whole["messages"]
    if not isinstance(cell, str):
        return cell
    found = unpacked(cell)
    if found is cell and _IS_MESSAGE.match(cell):
        try:
            parsed(cell)
        except json.JSONDecodeError as error:
            if error.msg != "Extra data":  # text follows the messages: they are part of a text
                why = f"{column!r} is the text of messages, but not JSON; write it with json.dumps"
                raise RowError(why) from error
    messages = found if isinstance(found, list) else [found]
    speakers = [_speaker(message) for message in messages]
    if column in READ["conversation"] and all(isinstance(message, str) for message in messages):
        return found
    known = any(isinstance(speaker, str) and speaker in ROLES for speaker in speakers)
    return found if known and None not in speakers else cell


def _speaker(entry: Any) -> Any:
    """Return who says a message; None for what is no message."""
    if not isinstance(entry, Mapping):
        return None
    if "role" in entry:
        return entry["role"] if "content" in entry or "tool_calls" in entry else None
    return entry.get("from") if "value" in entry else None


def turns(messages: Any, column: str) -> tuple[Turn, ...]:
    """Return chat messages ``[{role, content}, …]``, or ShareGPT's ``[{from, value}, …]``, as turns. A string
    becomes one user turn unless it holds messages as JSON, a single message a list of one, and of a list of
    texts user and assistant say one each in turn."""
    messages = messages_in(messages, column)
    if isinstance(messages, str):
        return (Turn("user", messages),)
    if isinstance(messages, Mapping):
        messages = [messages]
    if not isinstance(messages, list) or not messages:
        raise RowError(f"{column!r} is neither a string nor a list of messages")
    if all(isinstance(message, str) for message in messages):
        return tuple(Turn(("user", "assistant")[i % 2], text) for i, text in enumerate(messages))
    calling = any(isinstance(message, Mapping) and message.get("tool_calls") for message in messages)
    return tuple(_turn(message, column, calling) for message in messages)


def marks(messages: Any, column: str) -> list[bool | None]:
    """Return for each message whether it says that it is learned, or that it is not; None where it says
    neither. Raises RowError for a mark that is neither."""
    messages = messages_in(messages, column)
    messages = [messages] if isinstance(messages, Mapping) else messages
    found: list[bool | None] = []
    for message in messages if isinstance(messages, list) else ():
        keys = message if isinstance(message, Mapping) else {}
        said = [truth(keys, key) for key in MARKS if keys.get(key) is not None]
        if len(set(said)) > 1:
            raise RowError(f"a message of {column!r} says that it is learned, and that it is not")
        found.append(said[0] if said else None)
    return found


def trained_at(conversation: tuple[Turn, ...], marked: list[bool | None], which: str | None) -> list[int]:
    """Return which turns of a conversation are trained on: those that are marked, where ``which``
    (``data.trained_turns``) is None or ``marked``; without marks, or with ``last``, the last one."""
    answers = [i for i, turn in enumerate(conversation) if turn.role == "assistant"]
    marked = [*[None] * (len(conversation) - len(marked)), *marked]
    if which == "all":
        return [i for i in answers if not conversation[i].calls]
    if which == "last" or not any(marked[i] is not None for i in answers):
        return [len(conversation) - 1] if which != "marked" and marked[-1:] != [False] else []
    learned = [i for i in answers if marked[i]]
    return learned or [i for i in answers if marked[i] is None]


def _check_marks(messages: Any, column: str, config: DataConfig | None) -> None:
    """Raise LeftOutError for messages whose last one is not to be learned, RowError where others are to be,
    which a row of one answer cannot train."""
    *earlier, last = marks(messages, column) or [None]
    if last is False:
        raise LeftOutError(f"the last message of {column!r} is marked as not to be learned")
    if any(earlier) and (config is None or config.trained_turns != "last"):
        raise RowError(
            f"messages of {column!r} before the last are marked to be learned, and these rows train one "
            "answer: type data.trained_turns=last"
        )


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
    speaker, content = message.get("role"), message.get("content")
    if "from" in message and speaker is None:
        speaker, content = message["from"], message.get("value")
    keys = keys_of(message, column, calling)
    if content is None and message.get("tool_calls"):
        content = ""
    if isinstance(content, list) and content:
        parts = [p.get("text") for p in content if isinstance(p, Mapping) and p.get("type") == "text"]
        texts = [part for part in parts if isinstance(part, str)]
        content = "".join(texts) if len(texts) == len(content) else content
    if not isinstance(content, str):
        raise RowError(f"a message of {column!r} has no 'content' string")
    role = ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise RowError(f"a message of {column!r} has the role {shown(speaker)}")
    return Turn(role, content, keys)


# Reading the parts of a row: the question, the answer, the label


def asked(values: Values, column: str | None = None) -> tuple[Turn, ...]:
    """Return the turns of a row before its answer: its system text, Alpaca's ``history`` and the question.

    ``column`` has the question, by default the first of the row's columns that may have it; () if none
    does. Alpaca's ``input`` follows ``instruction`` after an empty line, of choices and other lists an entry
    a line.
    """
    column = column or named(values, "prompt")
    conversation = () if column is None else turns(value(values, column), column)
    if column == "instruction" and len(conversation) == 1 and not is_empty(values.get("input")):
        cell, others = values["input"], dict(values).values()
        parts = choices(cell, others) or (cell if isinstance(cell, list) else [cell])
        below = "\n".join(text({"input": part}, "input") for part in parts)
        conversation = (Turn("user", f"{conversation[0].content}\n\n{below}"),)
    conversation = (*_history(values), *conversation)
    return led(values, conversation)


def led(values: Values, conversation: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """Return the conversation behind the row's system text, if it has one. Raises RowError for a conversation
    whose own system turn says something else."""
    system = named(values, "system")
    if system is None:
        return conversation
    lead = Turn("system", text(values, system))
    if conversation[:1] and conversation[0].role == "system" and conversation[0] != lead:
        raise RowError(f"{system!r} and the conversation's own system turn say different things")
    return conversation if conversation[:1] == (lead,) else (lead, *conversation)


def _history(values: Values) -> tuple[Turn, ...]:
    if is_empty(values.get("history")):
        return ()
    entries = listed(values, "history")
    if not all(isinstance(message, Mapping) for message in entries):
        if any(not isinstance(pair, list | tuple) or [*map(type, pair)] != [str, str] for pair in entries):
            raise RowError("'history' is not a list of pairs, question and answer")
        entries = [said for pair in entries for said in pair]
    return turns(entries, "history")


def question(values: Values) -> tuple[Turn, ...]:
    """Return ``asked``; raises RowError if no column has a question."""
    if named(values, "prompt") is None:
        there = [name for name in READ["prompt"] if name in values]
        raise RowError(f"no {there[0]!r}" if there else "no column 'prompt'")
    return asked(values)


def prompt_of(conversation: tuple[Turn, ...], reference: Any = None) -> Prompt:
    """Return a prompt; raises RowError unless the conversation ends with a user turn, or a tool's, that is
    not empty."""
    roles = [turn.role for turn in conversation]
    if roles[-1:] not in (["user"], ["tool"]) or "user" not in roles:
        raise RowError("the prompt does not end with a user turn")
    if not conversation[-1].content.strip():
        raise RowError("the prompt is empty")
    if isinstance(reference, Mapping | list):
        raise RowError(
            f"'reference' is a {type(reference).__name__}; name a key inside it, as in "
            "data.columns={reference: reward_model.ground_truth}, or write it as JSON text for a reward that "
            "reads JSON"
        )
    if isinstance(reference, float) and reference.is_integer():
        reference = int(reference)  # pandas writes whole numbers so, where one of their column is missing
    return Prompt(conversation, None if is_empty(reference) and reference != "" else str(reference))


def pair(prompt: Prompt, chosen: str | Completion, rejected: str | Completion) -> Group:
    """Return an offline pair; raises LeftOutError if both answers are the same, because they then carry no
    preference."""
    if chosen == rejected:
        raise LeftOutError("chosen and rejected are the same")
    return Group(prompt, (_completion(chosen), _completion(rejected)), PAIR)


def demonstration(prompt: Prompt, completion: str | Completion) -> Group:
    return Group(prompt, (_completion(completion),), (1.0,))


def _completion(completion: str | Completion) -> Completion:
    return Completion(completion) if isinstance(completion, str) else completion


def answered(
    head: tuple[Turn, ...], completion: Any, column: str, config: DataConfig | None = None
) -> tuple[tuple[Turn, ...], Completion]:
    """Return (conversation, answer) of a completion column.

    A string answers ``head``. Messages end with the assistant's answer. The messages before it either
    continue ``head`` or are the conversation again (as in the UltraFeedback sets), and then must contain
    ``head`` or be its end. The system turn of ``head`` stays unless they bring their own.
    """
    completion = messages_in(completion, column)
    if head and head[-1].role == "assistant":
        raise RowError(f"the prompt does not end with a user turn but with an answer, and {column!r} is one")
    if isinstance(completion, str):
        return head, Completion(completion)
    _check_marks(completion, column, config)
    before, answer = _last(turns(completion, column), column)
    if not before or before[0].role == "assistant":
        return head + before, answer
    lead, rest = split_system(head)
    new_lead, again = split_system(before)
    if rest and not _within(rest, again):
        if not _within(again, rest) or not _same(again[-1], rest[-1]):
            raise RowError(f"the conversation in {column!r} does not contain the prompt")
        again = rest
    return (new_lead or lead) + again, answer


def _last(conversation: tuple[Turn, ...], column: str) -> tuple[tuple[Turn, ...], Completion]:
    """Return (the turns before, the answer) of the assistant's turn that ends a conversation."""
    if conversation[-1].role != "assistant":
        raise RowError(f"{column!r} does not end with an assistant turn")
    if conversation[-1].calls:
        raise RowError(f"{column!r} ends with a call of a tool and without an answer")
    return conversation[:-1], Completion(conversation[-1].content, keys=conversation[-1].keys)


def _same(one: Turn, other: Turn) -> bool:
    return one.role == other.role and one.content.strip() == other.content.strip()


def _within(part: tuple[Turn, ...], whole: tuple[Turn, ...]) -> bool:
    """Return whether ``part`` stands in ``whole`` without a gap."""
    return any(all(map(_same, part, whole[i : i + len(part)])) for i in range(len(whole) - len(part) + 1))


def exchange(values: Values, config: DataConfig) -> tuple[Prompt, Completion]:
    """Return (prompt, answer) of a row with one answer: a column of its own, or the last turn of a
    conversation; with what was thought before it, if a column ``reasoning_content`` has that."""
    column = answer_column(values, config)
    if column is not None:
        conversation, answer = answered(question(values), value(values, column), column, config)
    else:
        column = named(values, "conversation")
        if column is None:
            raise RowError("no 'completion'" if "completion" in values else "no column 'completion'")
        _check_marks(value(values, column), column, config)
        conversation, answer = _last(asked(values, column), column)
    if config.apply_chat_template and not answer.keys and not is_empty(thought := values.get(THOUGHTS[0])):
        answer = replace(answer, keys=keys_of({THOUGHTS[0]: thought}, THOUGHTS[0], calling=False))
    return prompt_of(led(values, conversation), values.get("reference")), answer


def answer_column(values: Values, config: DataConfig) -> str | None:
    """Return the column of a row's answer; None if it is the end of the conversation that it asks."""
    mapped = "prompt" in (config.columns or {})  # what is typed as the prompt is asked
    return named(values, "completion") or (named(values, "conversation") if mapped else None)


# The formats: what a row becomes


def _paired(values: Values, chosen: str, rejected: str, config: DataConfig) -> Group:
    """Return the pair of two columns. Without a question, their common beginning is the prompt."""
    good, bad = (messages_in(value(values, column), column) for column in (chosen, rejected))
    head = asked(values)
    whole = [cell for cell in (good, bad) if not isinstance(cell, str)]
    if named(values, "prompt") is None and len(whole) == 1:
        head = (*head, *turns(whole[0], chosen)[:-1])  # a conversation, and a text in place of its end
    if named(values, "prompt") is None and not whole:
        there = [name for name in READ["prompt"] if name in values]
        if there and answer_at(good, text(values, rejected)) is None:
            raise RowError(f"no {there[0]!r}")
        shared = common_beginning(good, text(values, rejected))
        head, good, bad = (*head, *turns(shared, chosen)), good[len(shared) :], bad[len(shared) :]
    conversation, better = answered(head, good, chosen, config)
    other, worse = answered(head, bad, rejected, config)
    if conversation != other:
        raise RowError(f"{chosen} and {rejected} answer different conversations")
    return pair(prompt_of(led(values, conversation), values.get("reference")), better, worse)


@each_row
def preference(values: Values, config: DataConfig) -> Group:
    """A question, ``chosen`` and ``rejected``, as strings or messages; without a question, their common
    beginning is the prompt."""
    chosen, rejected = (named(values, part) or part for part in ("chosen", "rejected"))
    return _paired(values, chosen, rejected, config)


@each_row
def compared(values: Values, config: DataConfig) -> Group:
    """A question, two answers such as ``response_a`` and ``response_b``, and the better one's name or letter
    in ``winner`` (AlpacaEval's judgements: a number from 1 to 2). A tie is left out."""
    two = two_answers(values)
    column = named(values, "winner")
    if two is None or column is None:
        raise RowError("no two answers such as response_a and response_b" if column else "no column 'winner'")
    winner = value(values, column)
    if isinstance(winner, float) and (winner.is_integer() or 1 <= winner <= 2):
        winner = "tie" if winner == 1.5 else round(winner)
    word = str(winner).strip().lower()
    for (better, letter), (worse, _) in (two, two[::-1]):
        if word in (better.lower(), letter, f"model_{letter}"):
            return _paired(values, better, worse, config)
    if word.startswith(("tie", "both", "neither", "draw")):
        raise LeftOutError("a tie")
    raise RowError(
        f"{column!r} is {shown(winner)}, which names neither {two[0][0]} nor {two[1][0]} (write {two[0][1]} "
        f"or {two[1][1]})"
    )


@each_row
def prompt_completion(values: Values, config: DataConfig) -> Group | list[Group]:
    """A question and ``completion`` (Alpaca: ``output``), or messages that end with the answer. The result is
    a demonstration, or one for each turn that is trained on."""
    column = named(values, "conversation")
    if column is None or answer_column(values, config) is not None:
        return demonstration(*exchange(values, config))
    conversation = asked(values, column)
    trained = trained_at(conversation, marks(value(values, column), column), config.trained_turns)
    if not trained:
        raise LeftOutError(f"no answer of {column!r} is to be learned")
    reference = values.get("reference")
    exchanges = [_last(conversation[: i + 1], column) for i in trained]
    return [demonstration(prompt_of(before, reference), answer) for before, answer in exchanges]


@each_row
def unpaired(values: Values, config: DataConfig) -> Group:
    """``prompt_completion`` and ``label`` or ``kto_tag`` (true: desirable)."""
    prompt, answer = exchange(values, config)
    reward = 1.0 if truth(values, named(values, "label") or "label") else -1.0
    return Group(prompt, (answer,), (reward,))


@each_row
def prompt_only(values: Values, config: DataConfig) -> Group:
    """A question, and ``reference`` if answers can be checked. Every other column is kept for reward
    functions."""
    prompt = prompt_of(question(values), values.get("reference"))
    taken = {"prompt", *READ["conversation"], "reference", "tools", *(config.columns or {})}
    # dict() copies without marking them as read: that is for what decides
    rest = {name: cell for name, cell in dict(values).items() if name not in taken}
    columns = json.dumps(rest, ensure_ascii=False, default=str) if rest else ""
    if "NaN" in columns or "Infinity" in columns:  # no JSON: null
        columns = json.dumps(json.loads(columns, parse_constant=lambda _: None), ensure_ascii=False)
    return Group(replace(prompt, columns=columns))


@each_row
def scored(values: Values, config: DataConfig) -> Sample:
    """``prompt_completion`` and ``reward``, a number; the rows of a prompt are one group."""
    return (*exchange(values, config), number(values, "reward"))


@each_row
def feedback(values: Values, config: DataConfig) -> Group | Sample:
    """HALOs' feedback JSON.

    ``type`` says what a row is: ``binary_feedback`` (prompt, output, label), ``pairwise_feedback`` (prompt,
    output_A, output_B, label: 1 when A is better) or ``scalar_feedback`` (prompt, output, reward), whose rows
    are gathered into one group per prompt. Outputs are strings or messages.
    """
    kind = text(values, "type")
    if kind == "pairwise_feedback":
        two = ("output_A", "output_B")
        return _paired(values, *(two if truth(values, "label") else two[::-1]), config)
    if kind not in ("binary_feedback", "scalar_feedback"):
        raise RowError(f"the type {shown(kind)} is not binary_feedback, pairwise_feedback or scalar_feedback")
    prompt, answer = exchange(values, config)
    if kind == "scalar_feedback":
        return prompt, answer, number(values, "reward")
    return Group(prompt, (answer,), (1.0 if truth(values, "label") else -1.0,))
