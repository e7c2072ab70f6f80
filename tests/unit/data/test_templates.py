"""The chat templates of published models (those that TRL ships): what is trained on is what the template
itself writes, for every kind of row, or the row is refused."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers import PreTrainedTokenizerFast

from common.errors import ConfigError
from data import templates
from data.chat import Renderer
from data.formats import Format, feedback, preference, prompt_completion
from data.groups import from_dict, to_dict
from data.groups import groups as read_groups
from data.rows import Row
from data.templates import DATE, ChatTemplate, chosen_template, load_template
from data.types import Completion, Prompt, Sequence, Turn
from rollouts.samplers import Sample
from tests.tiny import make_config
from tests.tiny_tokenizers import byte_level

FOLDER = Path(str(importlib.util.find_spec("trl").submodule_search_locations[0]), "chat_templates")
NAMES = sorted(f.stem for f in FOLDER.glob("*.jinja") if not f.stem.endswith("_training"))
EOS = {  # of the models that the templates belong to
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "diffusion": "<turn|>",
    "gemma4": "<turn|>",
    "gemma": "<end_of_turn>",
    "glm": "<|endoftext|>",
    "gptoss": "<|return|>",
    "idefics": "<end_of_utterance>",
    "llama": "<|eot_id|>",
    "llava": "</s>",
    "muse": "<|eot|>",
    "phi": "<|endoftext|>",
    "smolvlm": "<end_of_utterance>",
}
ASK = {"role": "user", "content": "What is one and two?"}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "plus", "description": "adds", "parameters": PARAMETERS}}
ARGUMENTS = {"name": "plus", "arguments": {"b": None, "a": 71}}
CALL = {"type": "function", "id": "abcdefghi", "function": ARGUMENTS}
RESULT = {"role": "tool", "content": "3", "name": "plus", "tool_call_id": "abcdefghi"}
THOUGHT = "i add"


def says(**keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "It is 3.", **keys}


ANSWERS = {
    "plain": says(),
    "a think block": says(content=f"<think>\n{THOUGHT}\n</think>\n\nIt is 3."),
    "its end alone": says(content=f"{THOUGHT}\n</think>\n\nIt is 3."),
    "reasoning_content": says(reasoning_content=THOUGHT),
    "thinking": says(thinking=THOUGHT),
    "white space": says(content=" \nIt is 3.\n "),
}
PROMPTS: dict[str, dict[str, Any]] = {
    "a question": {"prompt": [ASK]},
    "a system turn": {"prompt": [{"role": "system", "content": "Be brief."}, ASK]},
    "turns": {"prompt": [ASK, says(reasoning_content="Count."), {"role": "user", "content": "And four?"}]},
    "tools": {"prompt": [ASK], "tools": [TOOL]},
    "a call": {"prompt": [ASK, says(content="", tool_calls=[CALL]), RESULT], "tools": json.dumps([TOOL])},
}


def tokenizer_of(name: str, template: str) -> PreTrainedTokenizerFast:
    eos = next((token for start, token in EOS.items() if name.startswith(start)), "<|im_end|>")
    machine = byte_level()
    machine.add_special_tokens(list(dict.fromkeys(["<bos>", eos, *re.findall(r"<[^<>\s'\"=]+>", template)])))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=machine, bos_token="<bos>", eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def rows_of(asked: dict[str, Any], answer: dict[str, Any]) -> list[tuple[Prompt, Completion]]:
    """The row as every kind of file has it, read by its format, and written and read again."""
    other = {"role": "assistant", "content": "No."}
    tools = {"tools": asked["tools"]} if "tools" in asked else {}
    whole = {"messages": [*asked["prompt"], answer]}
    scored = {"completions": [[answer], {"text": answer["content"]} | answer], "rewards": [1.0, 0.0]}
    kinds: list[tuple[Format, dict[str, Any]]] = [
        (prompt_completion, whole | tools),
        (preference, {"chosen": whole | tools, "rejected": {"messages": [*asked["prompt"], other]}}),
        (feedback, {**asked, "type": "scalar_feedback", "output": [answer], "reward": 0.5}),
        (read_groups, {**asked, **scored}),
    ]
    config = make_config("loss=sft").data
    made: list[Any] = [next(iter(read([Row("a.jsonl", 1, values)], config))) for read, values in kinds]
    made.append(from_dict(json.loads(json.dumps(to_dict(made[0])))))
    rows = [(group.prompt, group.completions[0]) for group in made]
    return [*rows, (made[3].prompt, made[3].completions[1])]


class Truth:
    """A row as transformers alone renders it with a template."""

    def __init__(self, renderer: Renderer, asked: dict[str, Any], answer: dict[str, Any]) -> None:
        assert renderer.chat is not None
        self.tokenizer, self.chat = renderer.tokenizer, renderer.chat
        found = asked.get("tools")
        self.tools = json.loads(found) if isinstance(found, str) else found
        messages = asked["prompt"]
        if messages[0]["role"] == "system" and not self.chat.takes_system:
            messages = [{"role": "user", "content": f"{messages[0]['content']}\n\n{ASK['content']}"}]
        self.messages = [self.as_parts(message) for message in [*messages, answer]]
        self.words = [m["content"] for m in (*messages, answer)]
        self.words += [answer.get(key, "") for key in ("reasoning_content", "thinking")]
        calls = any("tool_calls" in message for message in messages)
        self.words += ["adds" * bool(found), "71" * calls]

    def as_parts(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["role"] not in self.chat.parts:
            return message
        return message | {"content": [{"type": "text", "text": message["content"]}]}

    def text(self, end: int | None, add_generation_prompt: bool = False) -> str:
        more = {"add_generation_prompt": add_generation_prompt, "tools": self.tools, **DATE}
        try:
            return str(self.tokenizer.apply_chat_template(self.messages[:end], tokenize=False, **more))
        except (jinja2.TemplateError, TypeError):
            return ""

    def refusable(self) -> bool:
        """Whether the template does not write the row, or not as its prompt and what stands behind it."""
        opened, whole = self.text(-1, True), self.text(None)
        bare = "".join(re.sub("</?think>", "", whole).split())
        kept = all("".join(re.sub("</?think>", "", w).split()) in bare for w in self.words)
        blocks = whole.count("</think>") - self.text(-1).count("</think>")
        asks = [self.as_parts(ASK)]  # some leave the generation prompt out behind a tool's result
        opens = self.tokenizer.apply_chat_template(asks, tokenize=False, add_generation_prompt=True, **DATE)
        header = opens.removeprefix(self.tokenizer.apply_chat_template(asks, tokenize=False, **DATE))
        behind = opens != header and header != "" and whole[len(opened) :].startswith(header)
        return behind or not (opened and whole.startswith(opened) and kept and blocks < 2)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_what_the_template_writes_or_refused_where_it_does_not(name: str) -> None:
    tokenizer = tokenizer_of(name, (FOLDER / f"{name}.jinja").read_text())
    renderer = Renderer(tokenizer, max_length=9000, max_prompt_length=8000, template=tokenizer.chat_template)
    decode, eos = tokenizer.decode, str(tokenizer.eos_token)
    for asked, answer in itertools.product(PROMPTS.values(), ANSWERS.values()):
        made, *others = renderer.sequences(rows_of(asked, answer))
        truth = Truth(renderer, asked, answer)
        assert isinstance(made, str) == truth.refusable(), (made, truth.text(None))
        if isinstance(made, str):
            assert {made} == {*others}
            continue
        assert {made.key} == {one.key for one in others if isinstance(one, Sequence)}
        assert not any(isinstance(one, str) for one in others)
        opened, whole, own = truth.text(-1, True), truth.text(None), decode(made.completion_ids)
        assert (decode(made.prompt_ids), made.prompt_ids.tolist()) == (opened, ids_of(tokenizer, opened))
        assert made.completion_ids.tolist() == ids_of(tokenizer, own)
        written = own if whole.startswith(opened + own) else own.removesuffix(eos)
        assert whole[len(opened + written) :].strip() in ("", eos)


PLAIN = (  # a plain template, to be spoilt
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def renderer_of(template: str) -> Renderer:
    tokenizer = tokenizer_of("qwen", template)
    return Renderer(tokenizer, max_length=900, max_prompt_length=800, template=template)


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("name", ["qwen3", "glm4moe", "gemma4_v5"])
def test_variables_reach_the_template_as_transformers_gives_them(name: str, thinks: bool) -> None:
    source = (FOLDER / f"{name}.jinja").read_text()
    tokenizer = tokenizer_of(name, source)
    render = partial(tokenizer.apply_chat_template, [ASK], tokenize=False, add_generation_prompt=True)
    template = chosen_template(tokenizer, None, {"enable_thinking": thinks})
    renderer = Renderer(tokenizer, max_length=900, max_prompt_length=800, template=template)
    expected, prompt = render(enable_thinking=thinks), Prompt((Turn("user", ASK["content"]),))
    assert tokenizer.decode(renderer.prompt_ids(prompt)) == expected
    tokenizer.chat_template = template  # as it is exported: a default, which a server may still change
    assert render() == expected
    other = {"enable_thinking": not thinks}
    assert render(**other) == render(chat_template=source, **other)
    row = renderer.sequence(prompt, Completion("3", keys='{"reasoning_content": "i add"}'))
    assert isinstance(row, str) != thinks or name in ("qwen3", "gemma4_v5")


def test_variables_that_the_template_does_not_read_are_refused_with_those_that_it_does() -> None:
    tokenizer = tokenizer_of("llama3_1", (FOLDER / "llama3_1.jinja").read_text())
    known = "builtin_tools, custom_tools, date_string, tools_in_user_message"
    for key in ("enable_thinking", "messages", "bos_token", "loop_messages"):
        with pytest.raises(ConfigError, match=f"does not read {key}; it reads {known}$"):
            chosen_template(tokenizer, None, {key: True})
    dated = chosen_template(tokenizer, None, {"date_string": 'the "1st"', "builtin_tools": ["é", None, 1.5]})
    assert 'Today Date: the "1st"' in ChatTemplate(tokenizer, dated).opened(Prompt((Turn("user", "a"),)))


def test_a_named_template_is_chosen_and_none_is_taken_by_itself(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("qwen", PLAIN)
    (tmp_path / "mine.jinja").write_text("mine")
    tokenizer.chat_template = {"chatty": PLAIN, "rag": "rag" + PLAIN}
    with pytest.raises(ConfigError, match="several, and no default: choose of chatty, rag"):
        load_template(tokenizer)
    assert chosen_template(tokenizer, "rag", None) == "rag" + PLAIN
    assert chosen_template(tokenizer, str(tmp_path / "mine.jinja"), None) == "mine"
    tokenizer.chat_template["default"] = PLAIN
    assert load_template(tokenizer) == chosen_template(tokenizer, None, {}) == PLAIN


SPOILT = {
    "the user's words": PLAIN.replace("{{ m.content }}", "{{ m.content if m.role != 'user' }}"),
    "the assistant's words": PLAIN.replace("{{ m.content }}", "{{ m.content if m.role != 'assistant' }}"),
    "RecursionError": PLAIN + "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "not end": PLAIN + "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "MemoryError: it takes more than 1 GiB": PLAIN + "{{ 'a' * 9999999999 }}",
    "cannot render": PLAIN + "{% for %}",
}


@pytest.mark.parametrize("says", SPOILT)
def test_a_template_that_cannot_be_used_is_refused_in_one_message(says: str, monkeypatch) -> None:
    monkeypatch.setattr(templates, "SECONDS", 1)
    with pytest.raises(ConfigError, match=rf"model\.chat_template=….*{says}"):
        renderer_of(SPOILT[says])


def test_today_is_one_day_and_turns_that_are_left_out_are_told_of() -> None:
    turns = (Turn("user", "one?"), Turn("assistant", "two"), Turn("user", "three?"))
    made = renderer_of(PLAIN.replace("in messages %}", "in messages[-2:] %}"))
    assert isinstance(made.sequence(Prompt(turns[:1]), Completion("b")), Sequence)
    assert "leaves out what was said in earlier turns" in str(made.sequence(Prompt(turns), Completion("b")))
    for day in ("{{ strftime_now('%d %b %Y') }}", "{{ date_string }}"):
        made = renderer_of(day + PLAIN)
        assert made.tokenizer.decode(made.prompt_ids(Prompt(turns[:1]))).startswith("26 Jul 2024<")


@pytest.mark.parametrize("answer", ["b", "a <|im_end|> b", "<|im_end|>\n<|im_end|>b"])
def test_an_answer_keeps_its_words_behind_an_end_of_turn_within_it(answer: str) -> None:
    """Behind the end of a turn the template writes what depends on its words: the end is looked for."""
    made = renderer_of(PLAIN.replace("<|im_end|>\n", "<|im_end|>{{ m.content|length }}\n"))
    row = made.sequence(Prompt((Turn("user", "one?"),)), Completion(answer))
    assert isinstance(row, Sequence), row
    assert made.tokenizer.decode(row.completion_ids) == f"{answer}<|im_end|>"


def test_what_was_said_keeps_special_tokens_within_it_and_loses_those_behind_it() -> None:
    made = renderer_of(PLAIN + "{# <think> </think> #}")
    text = "<think>\na<|im_start|>\n</think>\n\n2 "
    ids = ids_of(made.tokenizer, text + "<|im_end|>")
    for sampled in (ids, ids[:-1], [*ids, made.tokenizer.eos_token_id]):
        assert Sample(tuple(sampled), True).completion(made).text == text
