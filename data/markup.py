"""Texts that are already rendered: chat markup of a known template inside a prompt or an answer, dialogues
written as text, and prompts that are repeated at the head of their answers.

A chat template would wrap such a text into one turn, markup and all. So it is read back into turns where it
can mean one thing only, and the row is dropped with the reason where it cannot. Markup counts only at the
beginning of a text: a question about markup stays a question.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from config.schema_data import DataConfig
from data.rows import Dropped, Row
from data.types import Completion, Group, Turn

_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter", "instruction"), "user"),
    **dict.fromkeys(("assistant", "model", "chatbot", "response"), "assistant"),
}
FIRST = 64
"""Groups at the beginning that show whether answers repeat their prompts."""


class MarkupError(Exception):
    """Markup that can mean more than one thing; the message is the reason that the data report shows."""


@dataclass(frozen=True)
class Markup:
    """How one family of chat templates writes turns."""

    name: str
    opens: re.Pattern[str]
    """The beginning of a turn; its group ``role`` says who speaks."""
    closes: tuple[str, ...] = ()
    """What may end a turn."""
    begins: str = "\0"
    """What may stand before the first turn."""
    system_before: bool = False
    """Whether words before the first turn are the system's."""

    @property
    def plain(self) -> bool:
        """Whether turns are marked by words alone, which a person may write too."""
        return not self.closes

    def turns(self, text: str) -> list[Turn]:
        """Return the turns of ``text``, stripped; none if it does not begin with a turn. Raises MarkupError
        for a turn of somebody else than system, user and assistant."""
        text = text.lstrip().removeprefix(self.begins)
        matches = list(self.opens.finditer(text))
        before = text[: matches[0].start()].strip() if matches else ""
        if not matches or (before and not self.system_before):
            return []
        turns = [Turn("system", before)] if before else []
        for match, end in zip(matches, [*(m.start() for m in matches[1:]), len(text)], strict=True):
            role = _ROLES.get(match["role"].lower())
            if role is None:
                raise MarkupError(f"a text in the markup of {self.name} has a turn of {match['role']!r}")
            turns.append(Turn(role, self.without_end(text[match.end() : end]).strip()))
        return turns

    def without_end(self, text: str) -> str:
        """Return the text without what closes its turn."""
        while self.closes and (bare := text.rstrip()).endswith(self.closes):
            text = next(bare.removesuffix(end) for end in self.closes if bare.endswith(end))
        return text


def _markup(name: str, opens: str, *closes: str, begins: str = "\0", before: bool = False) -> Markup:
    return Markup(name, re.compile(opens), closes, begins, before)


MARKUPS = (
    _markup("ChatML", r"<\|im_start\|>(?P<role>\w+)(?:\n|<\|im_sep\|>|$)", "<|im_end|>", "<|endoftext|>"),
    _markup(
        "Llama 3",
        r"<\|start_header_id\|>(?P<role>\w+)<\|end_header_id\|>",
        *("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
        begins="<|begin_of_text|>",
    ),
    _markup(
        "Llama 4", r"<\|header_start\|>(?P<role>\w+)<\|header_end\|>", "<|eot|>", begins="<|begin_of_text|>"
    ),
    _markup("Gemma", r"<start_of_turn>(?P<role>\w+)(?:\n|$)", "<end_of_turn>", "<eos>", begins="<bos>"),
    _markup("Granite", r"<\|start_of_role\|>(?P<role>\w+)<\|end_of_role\|>", "<|end_of_text|>"),
    _markup("harmony", r"<\|start\|>(?P<role>\w+)<\|message\|>", "<|end|>", "<|return|>"),
    _markup(
        "Command R",
        r"<\|START_OF_TURN_TOKEN\|><\|(?P<role>\w+)_TOKEN\|>",
        "<|END_OF_TURN_TOKEN|>",
        begins="<BOS_TOKEN>",
    ),
    _markup(
        "DeepSeek",
        r"<｜(?P<role>User|Assistant)｜>",
        "<｜end▁of▁sentence｜>",
        begins="<｜begin▁of▁sentence｜>",
        before=True,
    ),
    _markup(
        "Zephyr and Phi-3",
        r"<\|(?P<role>system|user|assistant|prompter|human)\|>\n?",
        *("</s>", "<|end|>", "<|endoftext|>"),
        begins="<s>",
    ),
    _markup("Human and Assistant", r"(?:^|\n\n)(?P<role>Human|Assistant):"),
    _markup(
        "Alpaca", r"(?:^|\n)### ?(?P<role>System|Instruction|User|Human|Response|Assistant):", before=True
    ),
    _markup("Vicuna", r"(?:^|\s)(?P<role>USER|ASSISTANT):", before=True),
)
_ALPACA = re.compile(r"Below is an instruction that describes a task[^\n]*")
"""Alpaca's sentence before the instruction, which belongs to the template."""
_INSTRUCTION = re.compile(r"\[INST\](.*?)\[/INST\]", re.DOTALL)
_SYSTEM = re.compile(r"\s*(?:<<SYS>>(.*?)<</SYS>>|\[SYSTEM_PROMPT\](.*?)\[/SYSTEM_PROMPT\])", re.DOTALL)
_SPACE_BEHIND = re.compile(r"\A(?:[ \t]*\n)+(?: (?! ))?|\A[ \t]+")
_HINTS = re.compile(r"<\||<｜|<start_of_turn>|\[INST\]|Human:|###|USER:")
_CLOSES = tuple({end for markup in MARKUPS for end in markup.closes})


def dialogue(text: str) -> tuple[str, list[Turn]] | None:
    """Return (the markup's name, the turns) of a text that a known template could have written; None for any
    other text. A last turn of the assistant without words is the point where the answer begins. Raises
    MarkupError."""
    if not _HINTS.search(text):
        return None
    if instruction_turns := _instructions(text):
        return "Llama 2 and Mistral", instruction_turns
    for markup in MARKUPS:
        turns = markup.turns(text)
        if markup.plain and not _alternate([turn.role for turn in turns]):
            continue
        if markup.name == "Alpaca" and turns and turns[0].role == "system":
            said = _ALPACA.sub("", turns[0].content).strip()
            turns = [*([Turn("system", said)] if said else []), *turns[1:]]
        if turns:
            return markup.name, turns
    return None


def answer_at(text: str) -> int | None:
    """Return where the last answer of a rendered dialogue begins, behind its heading; None for other
    texts."""
    begun = text.lstrip().removeprefix("<s>").lstrip()
    if begun.startswith("[INST]") and "[/INST]" in begun:
        return text.rindex("[/INST]") + len("[/INST]")
    for markup in MARKUPS:
        matches = list(markup.opens.finditer(text))
        roles = [_ROLES.get(match["role"].lower()) for match in matches]
        if not matches or roles[-1] != "assistant" or (markup.plain and not _alternate(roles)):
            continue
        if markup.system_before or not text[: matches[0].start()].strip().removeprefix(markup.begins):
            return matches[-1].end()
    return None


def _alternate(roles: Sequence[str | None]) -> bool:
    """Return whether user and assistant take turns, the user first, with system turns anywhere."""
    spoken = [role for role in roles if role != "system"]
    return spoken == [("user", "assistant")[i % 2] for i in range(len(spoken))]


def _instructions(text: str) -> list[Turn]:
    """Return the turns of ``[INST] question [/INST] answer</s>``, with or without a system text."""
    text = text.strip().removeprefix("<s>").lstrip()
    turns = []
    if match := _SYSTEM.match(text):
        turns.append(Turn("system", (match[2] or match[1]).strip()))
        text = text[match.end() :].lstrip()
    before, *parts = _INSTRUCTION.split(text)
    if before or not parts:
        return []
    for asked, answer in zip(parts[::2], parts[1::2], strict=True):
        if match := _SYSTEM.match(asked):
            turns.append(Turn("system", (match[1] or match[2]).strip()))
            asked = asked[match.end() :]
        said = answer.strip().removesuffix("<s>").strip().removesuffix("</s>").strip()
        turns += [Turn("user", asked.strip()), Turn("assistant", said)]
    return turns


Made = tuple[Group | Dropped, Row | None]
"""What a row became, and the row; None for a group of several rows."""


@dataclass
class Reader:
    """Read rendered texts of one source's groups back, and keep the account of it."""

    config: DataConfig
    counts: dict[str, int] = field(default_factory=dict)
    """What was read back -> number of rows"""
    firsts: dict[str, str] = field(default_factory=dict)
    """What was read back -> the first row"""

    def read(self, made: Iterator[Made]) -> Iterator[Made]:
        """Yield what rows became, with their rows: groups with their texts read back, and for markup that can
        mean more than one thing the reason. Where no chat template is applied, a rendered text is right as it
        is, and nothing changes."""
        if not self.config.apply_chat_template:
            yield from made
            return
        first = list(itertools.islice(made, FIRST))
        answered = [group for group, _ in first if isinstance(group, Group) and group.completions]
        repeat = sum(map(repeats_prompt, answered))
        repeated = repeat == len(answered) > 1
        for group, row in itertools.chain(first, made):
            if not isinstance(group, Group):
                yield group, row
                continue
            try:
                if repeat and repeats_prompt(group):
                    if repeated:
                        group = without_prompt(group)
                        self._note("rows whose answers began with the prompt, which was taken off", row)
                    else:
                        self._note("rows whose answers begin with the prompt, as not all do: left so", row)
                if any(wordless(completion) for completion in group.completions):
                    self._note("rows with an answer without a word, which teaches to end at once", row)
                name, group = unrendered(group)
                if name:
                    self._note(f"rows in the markup of {name}, read as turns", row)
                yield group, row
            except MarkupError as error:
                yield Dropped(row.file if row else "", row.number if row else 0, str(error)), row

    def _note(self, what: str, row: Row | None) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1
        self.firsts.setdefault(what, f"{row.file}, row {row.number}" if row else "of several rows")

    @property
    def lines(self) -> tuple[str, ...]:
        """A line for people on each thing that was read back."""
        return tuple(f"{n} {what} (first: {self.firsts[what]})" for what, n in self.counts.items())


def repeats_prompt(group: Group) -> bool:
    """Return whether the group has answers as text and each begins with the whole text of the prompt's last
    turn."""
    asked = group.prompt.turns[-1].content.strip()
    texts = [(c.text or "").strip() for c in group.completions if c.token_ids is None]
    return bool(texts) and all(
        text.startswith(asked) and len(text) > len(asked) and not text[len(asked)].isalnum() for text in texts
    )


def wordless(completion: Completion) -> bool:
    """Return whether an answer that came as text has none, and calls no tool."""
    if completion.token_ids is not None or completion.keys:
        return False
    return not completion.text or completion.text.isspace()


def without_prompt(group: Group) -> Group:
    """Return the group without the prompt's last turn at the head of its answers, and without the space or
    the empty lines behind it, which a chat template does not write. The first line keeps its indentation."""
    asked = group.prompt.turns[-1].content.strip()
    texts = ((c.text or "").lstrip()[len(asked) :] for c in group.completions)
    kept = [replace(c, text=_SPACE_BEHIND.sub("", t)) for c, t in zip(group.completions, texts, strict=True)]
    return replace(group, completions=tuple(kept))


def unrendered(group: Group) -> tuple[str, Group]:
    """Return (the name of the markup, the group with turns in place of rendered texts); ("", the same group)
    without any. Raises MarkupError for markup that can mean more than one thing."""
    turns, name, opened = group.prompt.turns, "", ""
    prompt_dialogue = dialogue(turns[-1].content) if turns[-1].role == "user" else None
    if prompt_dialogue is not None and _asks(*prompt_dialogue):
        name, read = prompt_dialogue
        if read[-1].role == "assistant":  # words behind its heading open every answer (<think>)
            opened = read.pop().content
            opened = turns[-1].content[turns[-1].content.rindex(opened) :] if opened else ""
        if not read or read[-1].role != "user":
            raise MarkupError(f"the prompt, in the markup of {name}, does not end with a user turn")
        turns = _behind(turns[:-1], read)
    answers = []
    for completion in group.completions:
        text = completion.text or ""
        if completion.token_ids is None:
            inside, turns, text = _answer(turns, text, name)
            name = name or inside
            if prompt_dialogue is not None and name:  # the space behind a heading is the markup's
                text = text.strip() if not opened else text.rstrip()
            completion = replace(completion, text=opened + text) if name else completion
        answers.append(completion)
    if not name:
        return "", group
    return name, replace(group, prompt=replace(group.prompt, turns=turns), completions=tuple(answers))


def _asks(name: str, turns: list[Turn]) -> bool:
    """Return whether a prompt in this markup is surely a template's. Words that a person may write are, where
    they end with the heading of the answer to come."""
    markup = next((m for m in MARKUPS if m.name == name), None)
    if markup is None or not markup.plain:
        return True
    last = turns[-1]
    return (last.role == "assistant" and not last.content) or (
        last.role == "user" and not markup.system_before
    )


def _answer(turns: tuple[Turn, ...], text: str, name: str) -> tuple[str, tuple[Turn, ...], str]:
    """Return (the name of the answer's own markup or "", the prompt's turns, the answer's words). ``name``:
    the markup of the prompt."""
    answer_dialogue = dialogue(text)
    if answer_dialogue is not None and not any(
        m.name == answer_dialogue[0] and m.plain and m.system_before for m in MARKUPS
    ):
        inside, read = answer_dialogue
        if read[-1].role != "assistant" or not read[-1].content:
            raise MarkupError(
                f"an answer, in the markup of {inside}, does not end with the assistant's words"
            )
        before = read[:-1]
        if before and turns[-1].content.strip() not in [t.content for t in before if t.role == "user"]:
            raise MarkupError(
                f"the conversation in an answer, in the markup of {inside}, is not the prompt's"
            )
        whole = before and (len(turns) == 1 or before[0].role == "system" or len(before) >= len(turns))
        return (
            inside,
            _behind(turns[:-1] if len(turns) == 1 else (), before) if whole else turns,
            read[-1].content,
        )
    if name and any(m.opens.search(text) for m in MARKUPS if not m.plain):
        raise MarkupError(f"an answer behind a prompt in the markup of {name} holds further turns")
    closed = False
    while (bare := text.rstrip()).endswith(_CLOSES):
        if bare.endswith("</s>") and "<s>" in bare[bare.rfind("</s>", 0, -1) + 1 :]:
            break  # struck out, in HTML
        text = next(bare.removesuffix(end) for end in _CLOSES if bare.endswith(end))
        closed = True
    return "an end of turn behind answers" if closed else "", turns, text


def _behind(head: tuple[Turn, ...], read: list[Turn]) -> tuple[Turn, ...]:
    """Return ``read`` behind the turns of ``head``; a system turn in ``read`` takes the place of theirs."""
    if any(turn.role == "system" for turn in read):
        head = tuple(turn for turn in head if turn.role != "system")
    return (*head, *read)
