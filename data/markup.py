"""Texts that hold conversations: dialogues written with headings, which are read back into turns; the markup
of chat templates, which is refused; and prompts that are repeated at the head of their answers.

A chat template would wrap such a text into one turn, headings and all. Markup counts only at the beginning of
a text: a question about markup, or one that quotes a dialogue, stays a question.
"""

from __future__ import annotations

import itertools
import os.path
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from config.schema_data import DataConfig
from data.rows import Dropped, Row, RowError
from data.types import Group, Turn

FIRST = 64
"""Groups at the beginning that show whether prompts are dialogues, and whether answers repeat them."""
MOST = 0.8
"""Share of the texts that two headings alternate in where they are a dialogue's."""
_TEMPLATE = re.compile(
    r"\s*(?:<s>|<bos>)?\s*(<[|｜][^<>\s]{1,40}[|｜]>|<start_of_turn>|\[INST\]|<<SYS>>|\[SYSTEM_PROMPT\])"
)
"""How a text begins that a chat template wrote."""
_MARKS = re.compile(r"<[|｜][^<>\s]{1,40}[|｜]>|</?(?:start|end)_of_turn>|\[/?INST\]")
_CLOSES = re.compile(
    r"(?:<[|｜]\w*(?:end|eot|eom|eos|return)[\w▁]*[|｜]>|</s>|<eos>|<end_of_turn>)\s*\Z", re.IGNORECASE
)
"""What ends a turn."""
_HEADING = re.compile(r"(?:\A|\n|(?<=\s)(?=[A-Z]{4,}:))\s*(?:#+ ?)?(?P<who>[^\W\d_]+(?: [^\W\d_]+)?) ?[:：]")
"""A short heading with a colon at the beginning of a line, or in capitals."""
_SYSTEM = ("system",)
_SPEAKERS = {
    *("user", "human", "prompter", "instruction", "assistant", "chatbot", "model", "response", "gpt", "bot"),
}
"""Headings that are a dialogue's even where they come once."""
_SPACE_BEHIND = re.compile(r"\A(?:[ \t]*\n)+(?: (?! ))?|\A[ \t]+")

Headings = tuple[str, str]
"""The headings of who asks and of who answers, in small letters."""


def _who(match: re.Match[str]) -> str:
    return match["who"].lower()


def _alternating(text: str, headings: Headings) -> list[re.Match[str]]:
    """Return the places of two headings in a text; [] unless they take turns, who asks first. Behind a blank
    line or at a line's beginning alone, as the first ones are: an answer may quote others."""
    found = [match for match in _HEADING.finditer(text) if _who(match) in headings]
    lines = max((match[0].count("\n") for match in found[:2]), default=0)
    found = [match for i, match in enumerate(found) if i < 2 or match[0].count("\n") >= min(lines, 2)]
    in_turn = all(_who(match) == headings[i % 2] for i, match in enumerate(found))
    return found if in_turn else []


def _begins(text: str, match: re.Match[str]) -> bool:
    """Return whether a text begins with a heading, or with words before it and ends behind another."""
    opened = _HEADING.search(text)
    assert opened is not None
    before = text[: match.start()].strip()
    return not before or _who(opened) in _SYSTEM or text.rstrip().endswith((":", "："))


def headings_of(texts: Sequence[str]) -> Headings | None:
    """Return the two headings that alternate in most of the texts; None if there are none."""
    found = {text: list(_HEADING.finditer(text)) for text in texts}
    spoken = {text: [m for m in matches if _who(m) not in _SYSTEM] for text, matches in found.items()}
    first = Counter(_who(spoken[t][0]) for t in texts if spoken[t] and _begins(t, spoken[t][0]))
    asks, best = max(first, key=first.__getitem__, default=""), (0, 0, 0)
    if first[asks] < MOST * len(texts):
        return None
    answers = None
    for who in {_who(match) for matches in spoken.values() for match in matches} - {asks}:
        turns = [_alternating(text, (asks, who)) for text in texts]
        both = [matches for matches in turns if len(matches) > 1]
        places = sum(matches[1].start() for matches in both)
        rank = len(both), sum(map(len, both)), places
        if sum(map(bool, turns)) >= MOST * len(texts) and 2 * len(both) >= len(texts) and rank > best:
            answers, best = who, rank
    return None if answers is None else (asks, answers)


def read_dialogue(text: str, headings: Headings) -> list[Turn] | None:
    """Return the turns of a prompt that is a dialogue; None for another text. Raises RowError for a dialogue
    that ends with an answer, or whose speakers do not take turns."""
    opened = _HEADING.match(text)
    matches = _alternating(text, headings)
    if not matches and opened and _who(opened) == headings[0] and not _SPEAKERS.isdisjoint(headings):
        raise RowError(f"the speakers {headings[0]!r} and {headings[1]!r} of the prompt do not take turns")
    if not matches or not _begins(text, matches[0]):
        return None
    before = re.sub(r"\A\s*System:", "", text[: matches[0].start()], flags=re.IGNORECASE).strip()
    ends = [*(match.start() for match in matches[1:]), len(text)]
    contents = [text[match.end() : end].strip() for match, end in zip(matches, ends, strict=True)]
    sure = len(matches) > 2 or not _SPEAKERS.isdisjoint(headings)
    if len(matches) % 2 == 0 and contents.pop():
        if not sure:
            return None
        raise RowError(
            f"the prompt is a dialogue of {headings[0]!r} and {headings[1]!r} that ends with an answer: end "
            "it with a question, or type data.read_markup=off to train on texts as they are"
        )
    if len(matches) == 1 and not sure:
        return None
    if not contents[-1]:
        raise RowError(f"the last turn of {headings[0]!r} says nothing")
    turns = [Turn(("user", "assistant")[i % 2], content) for i, content in enumerate(contents)]
    return [Turn("system", before), *turns] if before else turns


def answer_at(one: str, other: str) -> int | None:
    """Return where the answers of two whole dialogues begin, behind the last heading that both have; None for
    other texts. Raises RowError for dialogues that differ before."""
    shared = len(os.path.commonprefix([one, other]))
    headings = [match for match in _HEADING.finditer(one) if _who(match) not in _SYSTEM]
    opened = [match for match in headings if match.end() <= shared]
    asks = _who(opened[0]) if opened else ""
    for match in (match for match in reversed(opened[1:]) if _who(match) != asks):
        turns, theirs = (_alternating(text, (asks, _who(match))) for text in (one, other))
        if len(turns) == len(theirs) and turns and len(turns) % 2 == 0 and turns[-1].end() == match.end():
            return match.end()
    known = [{_who(m) for m in _HEADING.finditer(text)} & _SPEAKERS for text in (one, other)]
    first = _HEADING.match(one)
    if first and _who(first) in _SPEAKERS and len(known[0]) > 1 and known[0] == known[1]:
        raise RowError("chosen and rejected answer different conversations")
    return None


def common_beginning(one: str, other: str) -> str:
    """Return the implicit prompt of two strings: their common beginning, up to the end of a word, or of two
    rendered dialogues what stands before their last answers.

    The space before the first differing word belongs to the completions (it is part of their first token).
    Raises RowError for two dialogues that differ before.
    """
    at = answer_at(one, other)
    if at is not None:
        return one[:at]
    length = len(os.path.commonprefix([one, other]))
    ends = min(len(one), len(other))  # a script without spaces is cut behind a sentence
    while length > 0 and not (length == ends or one[length].isspace() or one[length - 1] in "。！？：\n"):
        length -= 1
    return one[:length]


Converted = tuple[Group | Dropped, Row | None]
"""What a row became, and the row; None for a group of several rows."""


@dataclass
class Reader:
    """Read rendered texts of one source's groups back, and keep the account of it."""

    config: DataConfig
    notes: dict[str, tuple[int, str]] = field(default_factory=dict)
    """What was read back -> (number of rows, the first of them)"""
    headings: Headings | None = None
    """Of the dialogues that the prompts are"""
    counted: tuple[Row | None, int] = None, 0
    """The row before, and the answers in its last prompt"""

    def read(self, rows: Iterator[Converted]) -> Iterator[Converted]:
        """Yield what rows became, with their rows: groups with their texts read back, and for markup that can
        mean more than one thing the reason. Where no chat template is applied, a rendered text is right as it
        is, and nothing changes."""
        if not self.config.apply_chat_template or self.config.read_markup == "off":
            yield from rows
            return
        first = list(itertools.islice(rows, FIRST))
        answered = [group for group, _ in first if isinstance(group, Group) and group.completions]
        repeat = sum(map(repeats_prompt, answered))
        repeated = repeat == len(answered) > 1
        asked = [g.prompt.turns[-1].content for g, _ in first if isinstance(g, Group)]
        self.headings = headings_of(asked) if asked else None
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
                answers = [c for c in group.completions if c.token_ids is None]
                if not all(c.keys or (c.text or "").strip() for c in answers):
                    self._note("rows with an answer without a word, which teaches to end at once", row)
                group = self._unrendered(group, row)
                self._count_context(group, row)
                yield group, row
            except RowError as error:
                yield error.dropped(row), row

    def _unrendered(self, group: Group, row: Row | None) -> Group:
        """Return the group with a dialogue read into turns, and answers without what ends their turn. Raises
        RowError for the markup of a chat template."""
        turns, answers = group.prompt.turns, list(group.completions)
        texts = [turn.content for turn in turns[-1:]] + [c.text or "" for c in answers if c.token_ids is None]
        _refuse_markup(texts)
        read = None
        if self.headings and turns[-1].role == "user":
            read = read_dialogue(turns[-1].content, self.headings)
        if read is not None and self.headings:
            self._note("rows of dialogues of {!r} and {!r}, read as turns".format(*self.headings), row)
            head = turns[:-1] if read[0].role != "system" else [t for t in turns[:-1] if t.role != "system"]
            group = replace(group, prompt=replace(group.prompt, turns=(*head, *read)))
        for i, answer in enumerate(answers):
            if answer.token_ids is None and answer.text:
                text = answer.text if read is None else answer.text.strip()
                if read is not None and self.headings and (match := _HEADING.match(text)):
                    text = text[match.end() :].strip() if _who(match) == self.headings[1] else text
                bare = _CLOSES.sub("", text)
                if bare != text and bare.count("<s>") <= bare.count("</s>"):  # else struck out, in HTML
                    text = bare
                    self._note("rows with an end of turn behind answers, which was taken off", row)
                answers[i] = answer if text == answer.text else replace(answer, text=text)
        return replace(group, completions=tuple(answers))

    def _count_context(self, group: Group, row: Row | None) -> None:
        """Count the earlier answers of a row that none of its groups trains on."""
        answers = sum(turn.role == "assistant" for turn in group.prompt.turns)
        before = self.counted[1] + 1 if row is not None and self.counted[0] is row else 0
        self.counted = row, answers
        way = " (data.trained_turns=all trains on them)" if group.rewards == (1.0,) else ""
        if group.completions and answers > before:
            self._note(f"answers of earlier turns are context alone{way}", row, answers - before)

    def _note(self, what: str, row: Row | None, n: int = 1) -> None:
        here = f"{row.file}, row {row.number}" if row else "of several rows"
        count, first = self.notes.get(what, (0, here))
        self.notes[what] = count + n, first

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


def without_prompt(group: Group) -> Group:
    """Return the group without the prompt's last turn at the head of its answers, and without the space or
    the empty lines behind it, which a chat template does not write. The first line keeps its indentation."""
    question = group.prompt.turns[-1].content.strip()
    texts = ((c.text or "").lstrip()[len(question) :] for c in group.completions)
    kept = [replace(c, text=_SPACE_BEHIND.sub("", t)) for c, t in zip(group.completions, texts, strict=True)]
    return replace(group, completions=tuple(kept))


def _refuse_markup(texts: list[str]) -> None:
    for text in texts:
        if (mark := _TEMPLATE.match(text)) and len(_MARKS.findall(text)) > 1:
            raise RowError(
                f"a text is in the markup of a chat template ({mark[1]}): give messages, or type "
                "data.apply_chat_template=false to train on texts as they are"
            )
