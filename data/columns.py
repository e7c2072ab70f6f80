"""The names that people give to a row's columns: what each one means here, which of them were read, and what
to type for the others."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from common.errors import ConfigError
from config.schema_data import DataConfig
from data.rows import Dropped, Loaded, Row
from data.types import Group

Values = Mapping[str, Any]

READ: dict[str, tuple[str, ...]] = {
    "system": ("system", "system_prompt"),
    "question": ("prompt", "question", "instruction", "messages", "conversations", "conversation"),
    "conversation": ("messages", "conversations", "conversation"),
    "answer": ("completion", "output"),
    "label": ("label", "kto_tag", "desirable"),
    "reward": ("reward",),
    "better": (
        "winner",
        "preference",
        "preferred",
        "better",
        "better_response",
        "better_response_id",
        "label",
    ),
}
"""The part of a row -> the columns that may have it; the first one that a row has is read."""

MEANT: dict[str, tuple[str, ...]] = {
    "system": ("system", "system_prompt", "system_message"),
    "input": ("input", "context", "passage"),
    "prompt": (*READ["question"], "query", "problem", "input", "dialogue", "dialog", "history"),
    "chosen": ("chosen", "chosen_response"),
    "rejected": ("rejected", "rejected_response"),
    "completion": ("completion", "output", "response", "answer", "solution", "reply"),
    "completions": ("completions", "responses", "generations", "outputs", "candidates", "answers"),
    "rewards": ("rewards", "scores", "ratings"),
    "label": ("label", "labels", "kto_tag", "desirable", "is_desirable"),
    "reward": ("reward", "score", "rating"),
    "winner": READ["better"],
    "reference": ("reference", "ground_truth", "reference_answer", "final_answer", "answer", "solution"),
    "tools": ("tools",),
}
"""The name here -> the names that such a column has elsewhere. A column that has one of them decides what is
trained on, so that it is never left out silently."""
SEEN = ("images", "image", "videos", "video", "audios", "audio")
"""Columns with what no text model reads."""
OF_TEMPLATE = "chat_template_kwargs"
"""Column in which TRL's data give the chat template settings of their own, row by row."""
NUMBERS = ("margin", "weight", "loss_weight", "sample_weight", "importance", "importance_weight")
"""Columns of numbers that decide in losses elsewhere (the margin in TRL's reward trainer). Here they reach a
loss that asks for them (``data.numbers``)."""
MADE = (
    *("input_ids", "attention_mask", "completion_mask", "assistant_masks"),
    *("ref_chosen_logps", "ref_rejected_logps", "reference_chosen_logps", "reference_rejected_logps"),
)
"""Columns that TRL's trainers take in place of texts and of a reference's scores."""
_KNOWN = {OF_TEMPLATE, *NUMBERS, *MADE, *SEEN} | {name for names in MEANT.values() for name in names}

_WORDS = {
    "label": "is was thumbs liked upvoted",
    "chosen": "chosen j good better best preferred accepted positive winning",
    "rejected": "rejected k bad worse worst dispreferred negative losing loser",
    "prompt": "prompt question query problem instruction input user ask",
    "completion": "completion answer response output solution reply target assistant generated",
    "reward": "stars score rating points grade votes",
}
"""Words by which a column of another name is guessed, for a proposal alone."""

NO_TEXT = "\0"
"""A character that no text has. Two numbers that are alike do not say the same."""
_ONE_OF_TWO = re.compile(
    r"(.*?(?:response|answer|output|completion|conversation|candidate|reply|summary|text)[ _-]?)([ab012])",
    re.I,
)


def is_empty(value: Any) -> bool:
    """Return whether a value says nothing: null, NaN (pandas writes it for null), or an empty text, list or
    object."""
    if isinstance(value, float):
        return value != value
    return value is None or (isinstance(value, str | list | dict) and len(value) == 0)


def named(values: Values, part: str) -> str | None:
    """Return the first column that ``values`` has of a ``part`` of the row (READ), or None."""
    return next((name for name in READ[part] if not is_empty(values.get(name))), None)


def two_answers(has: Iterable[str]) -> tuple[tuple[str, str], tuple[str, str]] | None:
    """Return the two columns whose names differ in a or b, 1 or 2, 0 or 1 at their end, each with that
    letter; None if there are none, or more."""
    ends: dict[str, dict[str, str]] = {}
    for name in has:
        if match := _ONE_OF_TWO.fullmatch(name):
            ends.setdefault(match[1].lower(), {})[match[2].lower()] = name
    two = [
        sorted(letters.items()) for letters in ends.values() if "".join(sorted(letters)) in ("ab", "12", "01")
    ]
    if len(two) != 1 or len(ends) != 1:
        return None
    (a, first), (b, second) = two[0]
    return (first, a), (second, b)


# data.columns


def renamed(values: Values, config: DataConfig) -> Values:
    """Return ``values`` with the columns that ``data.columns`` maps (ours: theirs) under our names, and
    without ``data.ignore_columns``. Theirs may be a path into a column, as in
    ``reward_model.ground_truth``."""
    if not config.columns and not config.ignore_columns:
        return values
    mapped = {ours: at(values, theirs) for ours, theirs in (config.columns or {}).items()}
    gone = {*(config.columns or {}).values(), *(config.ignore_columns or ())}
    rest = {name: value for name, value in values.items() if name not in gone}
    return rest | {ours: value for ours, (value, there) in mapped.items() if there}


def at(values: Any, path: str) -> tuple[Any, bool]:
    """Return (the value at a path, whether it is there). A column whose name has dots itself comes first."""
    if isinstance(values, str) and values.lstrip().startswith(("{", "[")):
        try:
            values = json.loads(values)
        except ValueError:
            return None, False
    if isinstance(values, Mapping) and path in values:
        return values[path], True
    key, dot, rest = path.partition(".")
    if isinstance(values, list) and key.isdecimal() and int(key) < len(values):
        inner = values[int(key)]
        return at(inner, rest) if dot else (inner, True)
    return at(values[key], rest) if dot and isinstance(values, Mapping) and key in values else (None, False)


def check_named(config: DataConfig, rows: list[Row]) -> None:
    """Raise ConfigError for a column of ``data.columns`` or ``data.ignore_columns`` that none of the first
    rows has."""
    named = [(f"data.columns.{ours}", theirs) for ours, theirs in (config.columns or {}).items()]
    for key, theirs in [*named, *(("data.ignore_columns", name) for name in config.ignore_columns or ())]:
        if not any(at(row.values, theirs)[1] for row in rows):
            inside = theirs.partition(".")[0]
            there = next((row.values[inside] for row in rows if inside in row.values), None)
            has = f"; {inside} has {', '.join(there)}" if isinstance(there, Mapping) else ""
            why = f"{rows[0].file} has no such column; it has {', '.join(_all(rows))}{has}"
            raise ConfigError(key, theirs, why)


def _all(rows: Iterable[Row]) -> dict[str, None]:
    return {name: None for row in rows for name in row.values}


_EXCLUDE = (("chosen", "rejected"), ("completion", "label", "reward"), ("completions", "rewards"))
"""Names of three kinds of answers; a row has those of one kind."""


def proposal(has: Collection[str], unread: Collection[str], columns: Mapping[str, str] | None) -> str:
    """Return the ``data.columns`` to type for rows that have the columns ``has``, of which nothing reads
    ``unread``; "" if none would read more of them."""
    read = [name for name in has if name not in unread]
    asks = next((name for name in READ["question"] if name in read), None)
    taken = {ours for ours, names in MEANT.items() if set(names) & set(read) and ours != "reference"}
    way: dict[str, str] = {}
    for name in unread:
        there = taken | way.keys()
        fits = (ours for ours in _meanings(name) if ours not in there and not _excluded(ours, there))
        if (ours := next(fits, None)) is not None:
            way[ours] = name
    if "input" in way and asks is None and "prompt" not in way and "instruction" not in has:
        way["prompt"] = way.pop("input")
    if "input" in way and "instruction" not in read:  # it follows an instruction alone
        way["instruction"], asks = way.pop("prompt", asks or "…"), None
    if any(map(_ONE_OF_TWO.fullmatch, unread)) and not way.keys() & {"chosen", "rejected"}:
        way["winner"] = "…"
    for one, other in (("chosen", "rejected"), ("rejected", "chosen")):
        if one in way and other not in taken:
            way.setdefault(other, "…")
    if way and asks == "question":
        way.setdefault("prompt", asks)
    way = dict(columns or {}) | {ours: theirs for ours, theirs in way.items() if ours != theirs}
    order = ["system", "instruction", "input", "prompt", "chosen", "rejected"]
    in_order = dict(sorted(way.items(), key=lambda item: [*order, item[0]].index(item[0])))
    return typed(in_order) if way and way != columns else ""


def question_proposal(loaded: Loaded, columns: Mapping[str, str] | None) -> str:
    """Return the ``data.columns`` to type for rows of which no column was read as the prompt, although one
    that was not read may be it; "" if there is none."""
    asks = [name for name in loaded.unused if "prompt" in _meanings(name)]
    there = set(READ["question"]) & set(loaded.columns)
    return "" if there else proposal([*loaded.columns, *asks], asks, columns)


def _meanings(name: str) -> list[str]:
    name = name.lower().rpartition(".")[2]
    exact = [ours for ours, names in MEANT.items() if name in names and ours != "winner"]
    if _ONE_OF_TWO.fullmatch(name):
        return exact
    words = set(re.split(r"[\W_]+", name))
    if words & {"non", "not", "un"} and words & set(_WORDS["chosen"].split()):
        return ["rejected"]
    return exact or [ours for ours, heard in _WORDS.items() if words & set(heard.split())][:1]


def _excluded(ours: str, there: Collection[str]) -> bool:
    others = {name for kind in _EXCLUDE if ours not in kind for name in kind}
    return any(ours in kind for kind in _EXCLUDE) and not others.isdisjoint(there)


def no_format(rows: list[Row], columns: Mapping[str, str] | None) -> ConfigError:
    """Return the refusal of rows whose columns are those of no format."""
    has = list(_all(rows))
    for i, inner in enumerate(map(rows[0].values.get, has)):
        has[i] += ".messages" * (isinstance(inner, Mapping) and "messages" in inner)
    kinds = ("prompt", "chosen", "rejected"), ("prompt", "completion")
    empty = " or ".join(typed(dict.fromkeys(names, "…")) for names in kinds)
    return ConfigError(
        "data.columns",
        columns,
        f"the columns of {rows[0].file} ({', '.join(_all(rows))}) are those of no known format; say which "
        f"are which, as in {proposal(has, list(has), columns) or empty}",
    )


def typed(columns: Mapping[str, str]) -> str:
    """Return the setting as one types it."""
    pairs = ", ".join(f"{ours}: {_quoted(theirs)}" for ours, theirs in columns.items())
    return f'"data.columns={{{pairs}}}"'


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[\w.… -]+", name) else "'" + name.replace("'", r"\'") + "'"


# What was read


@dataclass
class _Shape:
    """The rows that fill the same columns: a table gives every row all columns."""

    rows: int = 0
    kept: list[Row] = field(default_factory=list)
    read: set[str] = field(default_factory=set)


class Columns:
    """Record of the columns that a format reads in the first rows of each set of columns that rows fill."""

    MOST = 64
    """Number of rows that are watched of each set of columns."""
    SHAPES = 256
    """Number of sets of columns that are watched."""

    def __init__(self, config: DataConfig, strict: bool, answers: bool) -> None:
        """``strict``: whether a column that decides must be read. The function of a published set knows what
        it leaves out. ``answers``: whether the format reads any."""
        self.config, self.strict, self.answers = config, strict, answers
        self.refusal: ConfigError | None = None
        """Of rows without answers, the refusal unless a reward function gets their columns"""
        self.row: Row | None = None
        """The row that is being converted"""
        self._shape = _Shape()
        """Its shape, if it is watched"""
        self.shapes: dict[tuple[str, ...], _Shape] = {}
        """The columns that rows fill -> the rows"""
        self._names: dict[str, None] = {}
        """The columns that rows have, in their order"""

    def watched(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yield the rows as ``_watched`` returns them."""
        for row in rows:
            self.row = row
            yield self._watched(row)
        self.row = None

    def noted(self, result: Group | Dropped) -> tuple[Group | Dropped, Row | None]:
        """Return what a row became, with the row; None for one made of several. A row that was dropped is not
        counted, because not all of it was read."""
        kept = self._shape.kept
        if isinstance(result, Dropped) and kept and kept[-1] is self.row:
            kept.pop()
        return result, self.row

    def _watched(self, row: Row) -> Row:
        """Return the row; one of the first rows is returned as a mapping that records which columns are
        read. Raises ConfigError once the first rows show that a column that decides is not."""
        filled = tuple([name for name, cell in row.values.items() if not is_empty(cell)])
        shape = self.shapes.get(filled)
        if shape is None:
            if len(self.shapes) == self.SHAPES:
                return row
            shape = self.shapes[filled] = _Shape(read=set(self.config.numbers or ()))
            self._names |= dict.fromkeys(row.values)
        self._shape = shape
        shape.rows += 1
        if shape.rows > self.MOST:
            if shape.rows == self.MOST + 1 and len(self._names) == len(row.values):
                self.check()  # all rows so far have the same columns
            return row
        shape.kept.append(row)
        return replace(row, values=_Watched(row.values, shape.read))

    @property
    def used(self) -> tuple[str, ...]:
        """The columns that were read, in their order."""
        return tuple(c for c in self._names if any(c in shape.read for shape in self.shapes.values()))

    @property
    def unused(self) -> tuple[str, ...]:
        """The columns that were never read, in their order."""
        used = set(self.used)
        return tuple(c for c in self._names if c not in used)

    def check(self) -> None:
        """Raise ConfigError if a tenth of the rows have a column that decides what is trained on and that
        nothing reads, and the words are in no other column."""
        lost, rows = Counter[str](), sum(shape.rows for shape in self.shapes.values())
        first: dict[str, tuple[Row, _Shape]] = {}
        for shape in self.shapes.values():
            for row in shape.kept:
                for name in _lost(row.values, shape.read, self.strict, self.answers):
                    lost[name] += shape.rows / len(shape.kept)  # type: ignore[assignment]
                    first.setdefault(name, (row, shape))
        names = [name for name in first if lost[name] >= 0.1 * rows or name == OF_TEMPLATE]
        if not names:
            return
        row, shape = first[names[0]]
        columns = self.config.columns
        without = [*(self.config.ignore_columns or ()), *(name.partition(".")[0] for name in names)]
        ignore = f'"data.ignore_columns=[{", ".join(map(_quoted, without))}]"'
        where = f"{row.file} row {row.number}"
        for kind, why in (SEEN, "which no text model reads"), (MADE, "made elsewhere; here a run makes them"):
            if read := [name for name in names if name.lower() in kind]:
                text = f"{where} has {', '.join(read)}, {why}: type {ignore} to train on the texts alone"
                raise ConfigError("data.path", row.file, text)
        if OF_TEMPLATE in names:
            text = json.dumps(row.values[OF_TEMPLATE], ensure_ascii=False).replace('"', "")
            raise ConfigError(
                "data.columns",
                columns,
                f"{where} has {OF_TEMPLATE}, which are settings here: for all rows alike they are "
                f"'model.{OF_TEMPLATE}={text}'; with it, or without any, type {ignore}",
            )
        they, them = ("it", "it") if len(names) == 1 else ("they", "them")
        others = () if self.answers else (c for c in row.values if c not in {*names, *shape.read})
        ways = list(filter(None, [proposal(row.values, [*names, *others], columns)]))
        if numbers := [name for name in names if name.lower() in NUMBERS]:
            every = [*(self.config.numbers or ()), *numbers]
            ways.append(f'"data.numbers=[{", ".join(map(_quoted, every))}]" for a loss that reads it')
        self.refusal = ConfigError(
            "data.columns",
            columns,
            f"nothing reads {', '.join(map(repr, names))} of {where}, and {they} may decide what is trained "
            f"on; type {', or '.join([*ways, f'{ignore} to train without {them}'])}",
        )
        if self.answers:
            raise self.refusal


def _lost(values: Values, read: set[str], strict: bool, answers: bool) -> list[str]:
    """Return the columns of a row, or paths into one, that say what no column says that is read."""
    unread = {name: value for name, value in values.items() if name not in read and not is_empty(value)}
    if strict:
        for name, value in list(unread.items()):
            if isinstance(value, Mapping) and (inner := value.get("ground_truth")) is not None:
                unread[f"{name}.ground_truth"] = inner
    names = [name for name in unread if name.lower() in SEEN or (strict and _decides(name, answers))]
    if not names:
        return []
    snippets = {piece for name in read if name in values for piece in _pieces(values[name])} - {NO_TEXT}
    text = "\n".join(snippets)

    def repeated(piece: str) -> bool:  # a short text may be part of a longer one by chance
        return piece in snippets or (len(piece) > 20 and piece in text)

    return [name for name in names if not all(map(repeated, _pieces(unread[name])))]


def _decides(name: str, answers: bool) -> bool:
    """Return whether a column of this name says what is trained on; where no answer is read, any that sounds
    like one does."""
    name = name.lower().rpartition(".")[2]
    heard = re.split(r"[\W_]+", name)[-1]
    sounds = not answers and any(
        heard in _WORDS[ours].split() for ours in ("chosen", "rejected", "completion")
    )
    return name in _KNOWN or _ONE_OF_TWO.fullmatch(name) is not None or sounds


def _pieces(value: Any) -> Iterator[str]:
    """Yield the texts of a value: of messages what they say, not who says it. A number is no text: it yields
    NO_TEXT."""
    if isinstance(value, str):
        yield value.strip()
    elif isinstance(value, Mapping):
        contents = [value[key] for key in ("content", "value") if key in value]
        for inner in contents or value.values():
            yield from _pieces(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _pieces(inner)
    elif value is not None:
        yield NO_TEXT


class _Watched(dict[str, Any]):
    """Values of a row that record which columns are read."""

    def __init__(self, values: Values, read: set[str]) -> None:
        super().__init__(values)
        self._read = read

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    def items(self) -> Any:
        self._read.update(self)
        return super().items()

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return super().get(key, default)
