"""Somebody else's turn behind an answer: the tokens that the chat template puts there, or a refusal."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from common.errors import ConfigError
from data.chat import Renderer
from data.templates import load_template
from data.turns import AddedTurns
from data.types import Completion, Prompt, Turn
from tests.tiny import ROOT
from tests.tiny_tokenizers import FAMILIES, tiny_tokenizer

THINKING = (  # as Qwen 3's: what was thought goes once a user has asked on
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set said = m['content'] %}"
    "{% if m['role'] == 'assistant' and loop.index0 < ns.last %}{% set said = said.split('</think>')[-1] %}"
    "{% endif %}{{ '<|im_start|>' + m['role'] + '\n' + said + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ONCE = (  # closes the last answer alone
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% if loop.last %}{{ '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ANSWERS = ("one and", "two", "three")


def renderer(family: str, template: str | None = None) -> Renderer:
    tokenizer = tiny_tokenizer(family)
    template = template or load_template(tokenizer)
    return Renderer(tokenizer, max_length=512, max_prompt_length=400, template=template)


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_put_together_is_what_the_template_writes_of_the_whole(family: str, role: str) -> None:
    made = renderer(family)
    if role == "tool" and not made.chat.takes_tool:
        with pytest.raises(ConfigError, match=r"environment\.role=tool: the chat template has no tool turns"):
            AddedTurns(made, role)
        return
    added, decode = AddedTurns(made, role), made.tokenizer.decode
    turns = [Turn("user", "sum up")]
    ids = made.prompt_ids(Prompt(tuple(turns))).tolist()
    for answer in ANSWERS:
        ids += made.sequence(Prompt((turns[0],)), Completion(answer)).completion_ids.tolist()
        ids += added.ids("go on", closed=True)
        turns += [Turn("assistant", answer), Turn(role, "go on")]
        whole = made.chat.apply(turns, add_generation_prompt=True)
        assert decode(ids).replace(" ", "") == whole.replace(" ", "")


def test_a_turn_that_was_interrupted_is_closed_by_what_is_added() -> None:
    made = renderer("qwen2")
    added = AddedTurns(made, "tool")
    assert made.tokenizer.decode(added.ids("8", closed=False)).startswith("<|im_end|>\n<|im_start|>tool\n8")
    assert made.tokenizer.decode(added.ids("8", closed=True)).startswith("\n<|im_start|>tool\n8")


def test_a_template_that_forgets_what_was_thought_is_refused_where_it_does() -> None:
    made = renderer("qwen2", THINKING)
    with pytest.raises(
        ConfigError, match=r"environment\.role=user: .* leaves out words .* environment\.role=tool"
    ):
        AddedTurns(made, "user")
    AddedTurns(made, "tool")


def test_a_template_that_closes_only_the_last_answer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"environment\.role=user: .* closes an answer in another way"):
        AddedTurns(renderer("qwen2", ONCE), "user")


def test_inside_the_policys_turn_and_without_a_template_there_is_the_text_alone() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "adder" / "model")
    made = Renderer(tokenizer, max_length=64, max_prompt_length=16, template=tokenizer.chat_template)
    assert tokenizer.decode(AddedTurns(made, "assistant").ids("15;", closed=False)) == "15;"
    assert AddedTurns(made, "assistant").ids("", closed=False) == []
    plain = Renderer(tokenizer, max_length=64, max_prompt_length=16, template=None)
    assert tokenizer.decode(AddedTurns(plain, "tool").ids("15;", closed=True)) == "15;"
