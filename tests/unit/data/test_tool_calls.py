"""Conversations with calls of tools: read, rendered by the template, kept in files, and refused in a
sentence."""

from __future__ import annotations

import json

import pytest

from data.chat import Renderer
from data.formats import RowError, prompt_completion, turns
from data.groups import from_dict, to_dict
from data.rows import Dropped, Row
from data.sources import load_groups
from data.types import Completion, Group, Prompt, Turn
from tests.tiny import make_config
from tests.tiny_tokenizers import tiny_tokenizer
from tests.unit.data.people import lines, local

HERMES = (  # as Qwen 2.5's
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') }}"
    "{% for c in m['tool_calls'] or [] %}{{ '<tool_call>' + c['function']['name'] + ' ' + "
    "c['function']['arguments'] | tojson + '</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALL = {"id": "c1", "type": "function", "function": {"name": "times", "arguments": '{"a": 12, "b": 7}'}}
MESSAGES = [
    {"role": "user", "content": "12 by 7?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "name": "times", "content": "84"},
    {"role": "assistant", "content": "It is 84.", "tool_calls": None},
]


def renderer(template: str | None = HERMES) -> Renderer:
    tokenizer = tiny_tokenizer("qwen2")
    template = template or tokenizer.chat_template
    return Renderer(tokenizer, max_length=400, max_prompt_length=300, template=template)


def called(arguments: object) -> list[dict]:
    """The conversation with other arguments of its call."""
    other = json.loads(json.dumps(MESSAGES))
    other[1]["tool_calls"][0]["function"]["arguments"] = arguments
    return other


def group_of(messages: object) -> Group | Dropped:
    row = Row("a.jsonl", 1, {"messages": messages})
    return next(iter(prompt_completion([row], make_config("loss=sft").data)))


def test_a_conversation_with_a_call_is_rendered_and_its_answer_alone_is_trained() -> None:
    """Arguments are the same as a text and as an object; a template that leaves calls out is told of."""
    group, made = group_of(MESSAGES), renderer()
    row = made.sequence(group.prompt, group.completions[0])
    decode = made.tokenizer.decode
    assert decode(row.prompt_ids) == (
        "<|im_start|>user\n12 by 7?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>times {"a": 12, "b": 7}</tool_call><|im_end|>\n'
        "<|im_start|>tool\n84<|im_end|>\n<|im_start|>assistant\n"
    )
    assert decode(row.completion_ids) == "It is 84.<|im_end|>"
    assert group_of(called(json.loads(CALL["function"]["arguments"]))).prompt == group.prompt
    said = renderer(made.tokenizer.chat_template).sequence(group.prompt, Completion("It is 84."))
    assert isinstance(said, str) and "writes no tool_calls; model.chat_template may name another" in said


def test_files_keep_the_calls_and_what_has_none_is_as_it_was() -> None:
    group = group_of(MESSAGES)
    assert from_dict(json.loads(json.dumps(to_dict(group)))) == group
    without = Prompt((*group.prompt.turns[:1], Turn("assistant", ""), Turn("tool", "84")))
    assert without.id != group.prompt.id
    plain = [{k: v for k, v in m.items() if k != "tool_calls"} | {"content": "a"} for m in MESSAGES]
    assert all(turn.keys == "" for turn in turns(plain, "messages"))


CALLS = [
    ("times", "'tool_calls' is a str, not a list"),
    ([{"name": "times"}], "has no 'function' with a 'name'"),
    ([{"function": {"name": "times", "arguments": "{"}}], "call of times cannot be used: it is no JSON"),
    ([{"function": {"name": "times", "arguments": "[1]"}}], "call of times are no object"),
]
ARGUMENTS = {
    r'{"city": "\ud800"}': "half of a surrogate pair",
    '{"a": ' + "[" * 300 + "]" * 300 + "}": "nested more than 100 levels deep",
    '{"a": ' + "7" * 5_000 + "}": "more than 4300 digits",
}


def test_what_is_no_call_is_named_and_its_row_dropped_with_its_reason(tmp_path) -> None:
    for calls, says in CALLS:
        with pytest.raises(RowError, match=says):
            turns([*MESSAGES[:1], {"role": "assistant", "tool_calls": calls}], "messages")
    dropped = group_of(MESSAGES[:2])
    assert isinstance(dropped, Dropped) and "ends with a call of a tool" in dropped.reason
    every = [*map(called, ARGUMENTS), *[MESSAGES] * 5]
    path = lines(tmp_path / "calls.jsonl", ({"messages": messages} for messages in every))
    loaded = load_groups(local(path, max_unreadable=1), "train")
    assert [drop.row for drop in loaded.dropped] == [1, 2, 3] and len(loaded.groups) == 5
    for drop, says in zip(loaded.dropped, ARGUMENTS.values(), strict=True):
        assert says in drop.reason
