"""Texts that are already rendered: chat markup of a known template inside a prompt or an answer, dialogues
written as text, and prompts that are repeated at the head of their answers.

A chat template would wrap such a text into one turn, markup and all. So it is read back into turns where it
can mean one thing only, and the row is dropped with the reason where it cannot. Markup counts only at the
beginning of a text: a question about markup stays a question.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from config.schema_data import DataConfig
from data.rows import Dropped, Row, RowError
from data.types import Completion, Group, Turn

_ROLES = {
    **dict.fromkeys(("system", "developer", "<<sys>>", "[system_prompt]"), "system"),
    **dict.fromkeys(("user", "human", "prompter", "instruction", "[inst]", "<</sys>>"), "user"),
    **dict.fromkeys(("assistant", "model", "chatbot", "response", "[/inst]"), "assistant"),
}
FIRST = 64
"""Groups at the beginning that show whether answers repeat their prompts."""


@dataclass(frozen=True)
class Markup:
    """How one family of chat templates writes turns."""

    name: str
    opens: re.Pattern[str]
    """The beginning of a turn; its group ``role`` says who speaks."""
    closes: tuple[str, ...] = ()
    """What may end a turn."""
    begins: re.Pattern[str] = re.compile("(?!)")
    """What a template writes before the first turn."""
    system_before: bool = False
    """Whether words before the first turn are the system's."""

    @property
    def plain(self) -> bool:
        """Whether turns are marked by words alone, which a person may write too."""
        return not self.closes

    def openings(self, text: str) -> tuple[str, list[re.Match[str]]]:
        """Return (the words before the first turn, the beginnings of the turns), without any if the text does
        not begin with a turn, or with words whose speakers do not take turns."""
        matches = list(self.opens.finditer(text))
        before = self.begins.sub("", text[: matches[0].start()]).strip() if matches else ""
        if (before and not self.system_before) or (self.plain and not _alternate(map(_role, matches))):
            return "", []
        return before, matches


def _markup(name: str, opens: str, *closes: str, begins: str = "(?!)", before: bool = False) -> Markup:
    return Markup(name, re.compile(opens), closes, re.compile(begins), before)


MARKUPS = (
    _markup(
        "Llama 2 and Mistral",
        r"(?s)(?:(?:<s>|\[INST\](?!\s*\[/INST\])|\[/SYSTEM_PROMPT\])\s*)*"
        r"(?P<role>\[/INST\]|(?:<</?SYS>>|\[INST\]|\[SYSTEM_PROMPT\])(?=.*\[/INST\]))",
        "</s>",
    ),
    _markup("ChatML", r"<\|im_start\|>(?P<role>\w+)(?:\n|<\|im_sep\|>|$)", "<|im_end|>", "<|endoftext|>"),
    _markup(
        "Llama 3",
        r"<\|start_header_id\|>(?P<role>\w+)<\|end_header_id\|>",
        *("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
        begins=r"<\|begin_of_text\|>",
    ),
    _markup(
        "Llama 4",
        r"<\|header_start\|>(?P<role>\w+)<\|header_end\|>",
        "<|eot|>",
        begins=r"<\|begin_of_text\|>",
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
    _markup("Human and Assistant", r"(?:\A\s*|\n\n)(?P<role>Human|Assistant):"),
    _markup(
        "Alpaca",
        r"(?:\A\s*|\n)### ?(?P<role>System|Instruction|User|Human|Response|Assistant):",
        begins=r"Below is an instruction that describes a task[^\n]*",
        before=True,
    ),
    _markup("Vicuna", r"(?:\A|\s)(?P<role>USER|ASSISTANT):", before=True),
)
_SPACE_BEHIND = re.compile(r"\A(?:[ \t]*\n)+(?: (?! ))?|\A[ \t]+")
_HINTS = re.compile(r"<\||<｜|<start_of_turn>|\[INST\]|Human:|###|USER:")
_CLOSES = tuple({end for markup in MARKUPS for end in markup.closes})


def _role(match: re.Match[str]) -> str | None:
    return _ROLES.get(match["role"].lower())


def _read(text: str) -> tuple[Markup, str, list[re.Match[str]]] | None:
    """Return (the markup, the words before the first turn, the beginnings of the turns) of a text that a
    known template could have written; None for any other text."""
    if not _HINTS.search(text):
        return None
    found = ((markup, *markup.openings(text)) for markup in MARKUPS)
    return next((one for one in found if one[2]), None)


def dialogue(text: str) -> tuple[Markup, list[Turn]] | None:
    """Return (the markup, the turns, stripped) of a text that a known template could have written; None for
    any other text. A last turn of the assistant without words is the point where the answer begins. Raises
    RowError for a turn of somebody else than system, user and assistant."""
    found = _read(text)
    if found is None:
        return None
    markup, before, matches = found
    turns = [Turn("system", before)] if before else []
    for match, end in zip(matches, [*(m.start() for m in matches[1:]), len(text)], strict=True):
        if (role := _role(match)) is None:
            raise RowError(f"a text in the markup of {markup.name} has a turn of {match['role']!r}")
        turns.append(Turn(role, _without_end(text[match.end() : end], markup.closes).strip()))
    return markup, turns


def answer_at(text: str) -> int | None:
    """Return where the last answer of a rendered dialogue begins, behind its heading; None for other
    texts."""
    _, _, matches = _read(text) or (None, "", [])
    return matches[-1].end() if matches and _role(matches[-1]) == "assistant" else None


def _without_end(text: str, closes: tuple[str, ...]) -> str:
    """Return the text without what closes its turn."""
    while (bare := text.rstrip()).endswith(closes):
        if bare.endswith("</s>") and "<s>" in bare[bare.rfind("</s>", 0, -1) + 1 :]:
            break  # struck out, in HTML
        text = next(bare.removesuffix(end) for end in closes if bare.endswith(end))
    return text


def _alternate(roles: Iterable[str | None]) -> bool:
    """Return whether user and assistant take turns, the user first, with system turns anywhere."""
    spoken = [role for role in roles if role != "system"]
    return spoken == [("user", "assistant")[i % 2] for i in range(len(spoken))]


Converted = tuple[Group | Dropped, Row | None]
"""What a row became, and the row; None for a group of several rows."""


@dataclass
class Reader:
    """Read rendered texts of one source's groups back, and keep the account of it."""

    config: DataConfig
    notes: dict[str, tuple[int, str]] = field(default_factory=dict)
    """What was read back -> (number of rows, the first of them)"""

    def read(self, rows: Iterator[Converted]) -> Iterator[Converted]:
        """Yield what rows became, with their rows: groups with their texts read back, and for markup that can
        mean more than one thing the reason. Where no chat template is applied, a rendered text is right as it
        is, and nothing changes."""
        if not self.config.apply_chat_template:
            yield from rows
            return
        first = list(itertools.islice(rows, FIRST))
        answered = [group for group, _ in first if isinstance(group, Group) and group.completions]
        repeat = sum(map(repeats_prompt, answered))
        repeated = repeat == len(answered) > 1
        for group, row in itertools.chain(first, rows):
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
            except RowError as error:
                yield error.dropped(row), row

    def _note(self, what: str, row: Row | None) -> None:
        here = f"{row.file}, row {row.number}" if row else "of several rows"
        count, first = self.notes.get(what, (0, here))
        self.notes[what] = count + 1, first

    @property
    def lines(self) -> tuple[str, ...]:
        """A line for people on each thing that was read back."""
        return tuple(f"{n} {what} (first: {first})" for what, (n, first) in self.notes.items())


def repeats_prompt(group: Group) -> bool:
    """Return whether the group has answers as text and each begins with the whole text of the prompt's last
    turn."""
    question = group.prompt.turns[-1].content.strip()
    texts = [(c.text or "").strip() for c in group.completions if c.token_ids is None]
    return bool(texts) and all(
        text.startswith(question) and len(text) > len(question) and not text[len(question)].isalnum()
        for text in texts
    )


def wordless(completion: Completion) -> bool:
    """Return whether an answer that came as text has none, and calls no tool."""
    if completion.token_ids is not None or completion.keys:
        return False
    return not completion.text or completion.text.isspace()


def without_prompt(group: Group) -> Group:
    """Return the group without the prompt's last turn at the head of its answers, and without the space or
    the empty lines behind it, which a chat template does not write. The first line keeps its indentation."""
    question = group.prompt.turns[-1].content.strip()
    texts = ((c.text or "").lstrip()[len(question) :] for c in group.completions)
    kept = [replace(c, text=_SPACE_BEHIND.sub("", t)) for c, t in zip(group.completions, texts, strict=True)]
    return replace(group, completions=tuple(kept))


def unrendered(group: Group) -> tuple[str, Group]:
    """Return (the name of the markup, the group with turns in place of rendered texts); ("", the same group)
    without any. Raises RowError for markup that can mean more than one thing."""
    turns, name, opened = group.prompt.turns, "", ""
    found = dialogue(turns[-1].content) if turns[-1].role == "user" else None
    if found is not None and _asks(*found):
        name, read = found[0].name, found[1]
        if read[-1].role == "assistant":  # words behind its heading open every answer (<think>)
            opened = read.pop().content
            opened = turns[-1].content[turns[-1].content.rindex(opened) :] if opened else ""
        if not read or read[-1].role != "user":
            raise RowError(f"the prompt, in the markup of {name}, does not end with a user turn")
        turns = _behind(turns[:-1], read)
    answers = []
    for completion in group.completions:
        text = completion.text or ""
        if completion.token_ids is None:
            inside, turns, text = _answer(turns, text, name)
            name = name or inside
            if found is not None and name:  # the space behind a heading is the markup's
                text = text.strip() if not opened else text.rstrip()
            completion = replace(completion, text=opened + text) if name else completion
        answers.append(completion)
    if not name:
        return "", group
    return name, replace(group, prompt=replace(group.prompt, turns=turns), completions=tuple(answers))


def _asks(markup: Markup, turns: list[Turn]) -> bool:
    """Return whether a prompt in this markup is surely a template's. Words that a person may write are, where
    they end with the heading of the answer to come."""
    answered = turns[-1].role == "assistant"
    return not markup.plain or (not turns[-1].content if answered else not markup.system_before)


def _answer(turns: tuple[Turn, ...], text: str, name: str) -> tuple[str, tuple[Turn, ...], str]:
    """Return (the name of the answer's own markup or "", the prompt's turns, the answer's words). ``name``:
    the markup of the prompt."""
    found = dialogue(text)
    if found is not None and not (found[0].plain and found[0].system_before):
        inside, read = found[0].name, found[1]
        if read[-1].role != "assistant" or not read[-1].content:
            raise RowError(f"an answer, in the markup of {inside}, does not end with the assistant's words")
        before = read[:-1]
        if before and turns[-1].content.strip() not in [t.content for t in before if t.role == "user"]:
            raise RowError(f"the conversation in an answer, in the markup of {inside}, is not the prompt's")
        whole = before and (len(turns) == 1 or before[0].role == "system" or len(before) >= len(turns))
        if whole:
            turns = _behind(turns[:-1] if len(turns) == 1 else (), before)
        return inside, turns, read[-1].content
    if name and any(m.opens.search(text) for m in MARKUPS[1:] if not m.plain):  # brackets alone are words
        raise RowError(f"an answer behind a prompt in the markup of {name} holds further turns")
    left = _without_end(text, _CLOSES)
    return "" if left == text else "an end of turn behind answers", turns, left


def _behind(head: tuple[Turn, ...], read: list[Turn]) -> tuple[Turn, ...]:
    """Return ``read`` behind the turns of ``head``; a system turn in ``read`` takes the place of theirs."""
    if any(turn.role == "system" for turn in read):
        head = tuple(turn for turn in head if turn.role != "system")
    return (*head, *read)
