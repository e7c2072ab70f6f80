"""The names that people give to a row's columns: what each one means here, and which of them were read."""

from __future__ import annotations

import itertools
import json
import re
import reprlib
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from common.errors import ConfigError
from config.schema_data import DataConfig
from config.unknown_keys import nearest
from data.json_values import ALIKE, NO_TEXT, Said, choices, holds, is_empty, pieces, unpacked, words
from data.rows import Dropped, Row
from data.types import READ_KEYS, THOUGHT, Group

Values = Mapping[str, Any]

READ: dict[str, list[str]] = {
    part: names.split()
    for part, names in {
        "system": "system system_prompt",
        "prompt": "prompt question instruction messages conversations conversation",
        "conversation": "messages conversations conversation",
        "chosen": "chosen chosen_response",
        "rejected": "rejected rejected_response",
        "completion": "completion output",
        "completions": "completions generations",
        "rewards": "rewards ratings",
        "label": "label kto_tag desirable",
        "reward": "reward",
        "winner": "winner preference preferred better better_response better_response_id label",
    }.items()
}
"""The part of a row -> the columns that may have it; the first one that a row has is read."""

WORDS: dict[str, str] = {
    "label": "label labels kto desirable | is was thumbs liked upvoted",
    "chosen": "chosen | j good better best preferred accepted positive winning win",
    "rejected": "rejected | k bad worse worst dispreferred negative losing loser lose",
    "prompt": "prompt question query problem instruction input dialogue dialog history messages conversation "
    "conversations | user ask",
    "history": "history",
    "system": "system",
    "input": "input context passage",
    "completion": "completion output response answer solution reply | target assistant generated",
    "completions": "completions responses generations outputs candidates answers",
    "reward": "reward score rating | stars points grade votes",
    "rewards": "rewards scores ratings",
    "winner": "winner preference preferred better",
    "reference": "reference ground truth final answer solution | gold expected correct",
    "tools": "tools functions",
    "reasoning_content": "reasoning thinking thought thoughts | trajectory trajectories cot",
}
"""The name here -> the words in the names that such a column has elsewhere. A column whose name has none but
those before the bar decides what is trained on, so that it is never left out silently, however short its
texts are; by the others it is guessed, for a proposal alone."""
SEEN = re.compile(r"(image|video|audio)s?")
"""Columns with what no text model reads."""
OF_TEMPLATE = "chat_template_kwargs"
"""Column in which TRL's data give the chat template settings of their own, row by row."""
NUMBERS = re.compile(r"margin|(\w+_)?weight|importance")
"""Columns of numbers that decide in losses elsewhere (the margin in TRL's reward trainer). Here they reach a
loss that asks for them (``data.numbers``)."""
MADE = re.compile(r"input_ids|\w+_masks?|ref(erence)?_\w+_logps")
"""Columns that TRL's trainers take in place of texts and of a reference's scores."""
REST = "rest"
"""``data.ignore_columns=[rest]``: every column that nothing reads."""
_NOTED, _STOPS = 1, 2
FEW = 0.02
"""Share of the rows from which on a column that they fill is looked at."""
ONE_OF_TWO = re.compile(
    r"(.*?(?:response|answer|output|completion|conversation|candidate|reply|summary|text)[ _-]?)([ab012])",
    re.I,
)


def named(values: Values, part: str) -> str | None:
    """Return the first column that ``values`` has of a ``part`` of the row (READ), or None."""
    return next((name for name in READ[part] if not is_empty(values.get(name))), None)


def two_answers(has: Iterable[str]) -> tuple[tuple[str, str], tuple[str, str]] | None:
    """Return the two columns whose names differ in a or b, 1 or 2, 0 or 1 at their end, each with that
    letter; None if there are none, or more."""
    found = _series(filter(ONE_OF_TWO.fullmatch, has))
    if len(found) != 1 or len(found[0]) != 2:
        return None
    (a, first), (b, second) = sorted(found[0].items())
    return (first, a), (second, b)


def _series(has: Iterable[str]) -> list[dict[str, str]]:
    """Return the columns whose names differ in their last sign alone (opa, opb, opc; option1, option2): the
    sign -> the column."""
    series: dict[str, dict[str, str]] = {}
    for name in has:
        series.setdefault(name[:-1].lower(), {})[name[-1:].lower()] = name
    in_order = [sign[:n] for sign in ("abcde", "12345", "01234") for n in range(2, 6)]
    return [marks for marks in series.values() if "".join(sorted(marks)) in in_order]


# data.columns


def renamed(values: Values, config: DataConfig) -> Values:
    """Return ``values`` with the columns that ``data.columns`` maps (ours: theirs) under our names, and
    without ``data.ignore_columns``. Theirs may be a path into a column, as in
    ``reward_model.ground_truth``."""
    if not config.columns and not config.ignore_columns:
        return values
    mapped = {ours: at(values, theirs) for ours, theirs in (config.columns or {}).items()}
    gone = {*(config.columns or {}).values(), *(config.ignore_columns or ())}
    placed: dict[str, Any] = {}
    for name, value in values.items():  # ours stand where theirs stood
        here = [ours for ours, theirs in (config.columns or {}).items() if name in (theirs, _column(theirs))]
        placed |= {ours: mapped[ours][0] for ours in here if mapped[ours][1]}
        placed |= {} if name in gone or name in mapped else {name: value}
    return placed


def at(values: Any, path: str) -> tuple[Any, bool]:
    """Return (the value at a path, whether it is there). A column whose name has dots itself comes first."""
    values = unpacked(values)
    if isinstance(values, Mapping) and path in values:
        return values[path], True
    key, dot, rest = path.partition(".")
    if isinstance(values, list) and key.isdecimal() and int(key) < len(values):
        inner = values[int(key)]
        return at(inner, rest) if dot else (inner, True)
    return at(values[key], rest) if dot and isinstance(values, Mapping) and key in values else (None, False)


def check_named(config: DataConfig, rows: list[Row]) -> None:
    """Raise ConfigError for a column of ``data.columns`` or ``data.ignore_columns`` that none of the first
    rows has, and for a part of the row that is misspelt."""
    parts = [name for part in ("prompt", "chosen", "rejected", "completion") for name in READ[part]]
    for ours, theirs in (config.columns or {}).items():
        near = nearest(ours, parts)
        meant = f"did you mean {typed({str(near): theirs})}? A column of your own has a name less like it"
        if near not in (None, ours) and ours not in READ:
            raise ConfigError(f"data.columns.{ours}", theirs, meant)
    named = [(f"data.columns.{ours}", theirs) for ours, theirs in (config.columns or {}).items()]
    for key, theirs in [*named, *(("data.ignore_columns", name) for name in config.ignore_columns or ())]:
        if theirs != REST and not any(at(row.values, theirs)[1] for row in rows):
            inside = theirs.partition(".")[0]
            there = next((row.values[inside] for row in rows if inside in row.values), None)
            has = f"; {inside} has {', '.join(there)}" if isinstance(there, Mapping) else ""
            every = dict.fromkeys(name for row in rows for name in row.values)
            why = f"{rows[0].file} has no such column; it has {', '.join(every)}{has}"
            raise ConfigError(key, theirs, why)


def typed(columns: Mapping[str, str]) -> str:
    """Return the setting as one types it."""
    pairs = ", ".join(f"{ours}: {quoted(theirs)}" for ours, theirs in columns.items())
    return f'"data.columns={{{pairs}}}"'


def _column(path: str) -> str:
    return path.partition(".")[0]


def ignoring(names: Iterable[str]) -> str:
    """Return the setting by which columns are left out, as one types it."""
    return f'"data.ignore_columns=[{", ".join(map(quoted, names))}]"'


def quoted(name: str) -> str:
    return name if re.fullmatch(r"[\w.… -]+", name) else "'" + name.replace("'", r"\'") + "'"


# What was read


class UnreadError(ConfigError):
    """Columns that may decide what is trained on, and that nothing reads."""

    names: Sequence[str] = ()
    read: Sequence[str] = ()


Propose = Callable[[Sequence[str]], str]
"""What to type so that more of these columns are read; "" where nothing works."""


def no_proposal(names: Sequence[str]) -> str:
    """Propose nothing: what is tried is a proposal itself."""
    return ""


class Columns:
    """Record of the columns that a format reads, in the first rows that fill each column."""

    MOST = 64
    """Number of rows that are watched of each column."""

    def __init__(self, config: DataConfig, strict: bool, answers: bool, propose: Propose) -> None:
        """``strict``: whether a column that decides must be read. The function of a published set knows what
        it leaves out. ``answers``: whether the format reads any."""
        self.config, self.strict, self.answers, self.propose = config, strict, answers, propose
        self.tries = propose is no_proposal
        self.refusal: UnreadError | None = None
        """Of rows without answers, the refusal unless a reward function gets their columns"""
        self.notes: tuple[str, ...] = ()
        """The first words of further texts that nothing reads"""
        self.row: Row | None = None
        """The row that is being converted"""
        self.rows = 0
        self._filled, self._watches = Counter[str](), Counter[str]()
        """Column -> number of rows that fill it, of all and of the watched ones"""
        self._kept: list[tuple[Row, set[str]]] = []
        """The watched rows, and the columns that were read in each"""
        self._checked = 0
        self._names: dict[str, None] = {}
        """The columns that rows have, in their order"""

    def watched(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yield the rows; those of the first that fill a column as mappings that record which columns are
        read. Raises ConfigError once the first rows show that a column that decides is not."""
        for row in rows:
            self.row = row
            filled = [name for name, cell in row.values.items() if not is_empty(cell)]
            self.rows += 1
            self._filled.update(filled)
            if all(self._watches[name] >= self.MOST for name in filled):
                if self.rows == self.MOST + 1 and set(self._filled.values()) == {self.rows}:
                    self.check()  # all rows so far have the same columns
                yield row
                continue
            self._watches.update(filled)
            self._names |= dict.fromkeys(row.values)
            self._kept.append((row, read := set(self.config.numbers or ())))
            yield replace(row, values=_Watched(row.values, read))
        self.row = None

    def noted(self, result: Group | Dropped) -> tuple[Group | Dropped, Row | None]:
        """Return what a row became, with the row; None for one made of several. A row that was dropped is not
        counted, because not all of it was read."""
        if isinstance(result, Dropped) and self._kept and self._kept[-1][0] is self.row:
            self._kept.pop()
        return result, self.row

    def columns(self, used: bool) -> tuple[str, ...]:
        """Return the columns that were read, or those that never were, in their order."""
        every = set[str]().union(*(read for _, read in self._kept))
        return tuple(name for name in self._names if (name in every) == used)

    def check(self) -> None:
        """Raise UnreadError for columns that nothing reads and that may decide what is trained on: at least
        FEW of the rows fill them, and most of these say there what no column says that is read."""
        if REST in (self.config.ignore_columns or ()) or len(self._kept) == self._checked:
            return
        self._checked = len(self._kept)
        found: dict[str, list[tuple[int, bool, Row, Any]]] = {}
        for row, read in self._kept:
            said = Said(row.values[name] for name in row.values.keys() & read)
            for name, cell in self._parts(row.values, read):
                verdict = self._verdict(name, cell, row.values, read)
                found.setdefault(name, []).append((verdict, verdict > 0 and not said.has(cell), row, cell))
        kinds: dict[int, list[str]] = {_STOPS: [], _NOTED: [], 0: []}
        for name, seen in found.items():
            column = name if name in self._filled else name.partition(".")[0]
            filled = sum(not is_empty(row.values.get(column)) for row, _ in self._kept)
            verdict = statistics.median_low(one[0] for one in seen)
            lost = sum(one[0] == verdict and one[1] for one in seen) / filled
            if lost > 1 - ALIKE and lost * self._filled[column] >= FEW * self.rows:
                kinds[verdict].append(name)
        cells = (row.values[name] for row, read in self._kept for name in row.values if name in read)
        keys = dict.fromkeys(f"the key {key!r} of messages" for cell in cells for key in unread_keys(cell))
        texts = [f"{name!r}: {shortened(found[name][0][-1])}" for name in kinds[_NOTED]]
        self.notes = tuple(f"nothing of {what}" for what in (*texts, *keys))
        if names := kinds[_STOPS]:
            self._refuse(names, *next(one[2:] for one in found[names[0]] if one[1]))

    def _parts(self, values: Values, read: set[str]) -> Iterator[tuple[str, Any]]:
        """Yield (name, value) of the columns of a row that nothing reads; of a column of which
        ``data.columns`` names a path, and of a verifier's ``{ground_truth: …}``, the other keys inside."""
        paths = [path for path in (self.config.columns or {}).values() if path not in values]
        for name, cell in values.items():
            if name in read or is_empty(cell):
                continue
            inner = cell if isinstance(cell, Mapping) else {}
            keys = {f"{name}.{key}": one for key, one in inner.items() if not is_empty(one)}
            if not any(path.startswith(f"{name}.") for path in paths):
                yield name, cell
                keys = {
                    key: one for key, one in keys.items() if self.strict and key.endswith(".ground_truth")
                }
            yield from (item for item in keys.items() if not any(p.startswith(item[0]) for p in paths))

    def _verdict(self, name: str, cell: Any, values: Values, read: set[str]) -> int:
        """Return _STOPS for a column that may decide what is trained on, by its name or by what it holds;
        _NOTED for a text that stands behind the answers, or beside columns or a format that somebody typed;
        0 for others."""
        bare, column = name.lower().rpartition(".")[2], name if name in values else name.partition(".")[0]
        if SEEN.fullmatch(bare) or not self.strict:
            return _STOPS if SEEN.fullmatch(bare) else 0
        sounds = {"chosen", "rejected", "completion"}.intersection(sounds_as(split_name(bare)[-1:]))
        patterns = (NUMBERS, MADE, ONE_OF_TWO, re.compile(OF_TEMPLATE))
        named = known_as(bare) or bare in itertools.chain(*READ.values())
        named = named or any(pattern.fullmatch(bare) for pattern in patterns)
        if named or (sounds and not self.answers) or column in families(values):
            return _STOPS
        if (kind := holds(cell, naming(values))) != "text":
            return _STOPS if kind else 0
        answer = next((one for one in values if one in read and _is_answer(one)), None)
        before = next(one for one in values if one in (column, answer)) == column
        typed = self.config.format != "auto" or (self.config.columns and not self.tries)
        return _STOPS if before and not typed else _NOTED

    def _refuse(self, names: list[str], row: Row, cell: Any) -> None:
        columns, where = self.config.columns, f"{row.file} row {row.number}"
        ignore = ignoring([*(self.config.ignore_columns or ()), *dict.fromkeys(map(_column, names))])
        whys = (SEEN, "which no text model reads"), (MADE, "made elsewhere; here a run makes them")
        for pattern, why in whys:
            if read := [name for name in names if pattern.fullmatch(name.lower())]:
                text = f"{where} has {', '.join(read)}, {why}: type {ignore} to train on the texts alone"
                raise ConfigError("data.path", row.file, text)
        they, them = ("it", "it") if len(names) == 1 else ("they", "them")
        ways = list(filter(None, [self.propose(names)]))
        left = [name for name in of_choices(row.values) if name in names and not ways]
        convert = f"{TO_CONVERT.format(', '.join(left))}, or " if left else ""
        if numbers := [name for name in names if NUMBERS.fullmatch(name)]:
            every = [*(self.config.numbers or ()), *numbers]
            ways.append(f'"data.numbers=[{", ".join(map(quoted, every))}]" for a loss that reads it')
        if settings := row.values.get(OF_TEMPLATE) if OF_TEMPLATE in names else None:
            text = json.dumps(settings, ensure_ascii=False).replace('"', "")
            ways.append(f"'model.{OF_TEMPLATE}={text}' {ignore} for all rows alike")
        self.refusal = UnreadError(
            "data.columns",
            columns,
            f"nothing reads {', '.join(map(repr, names))} of {where} ({shortened(cell)}), and {they} may "
            f"decide what is trained on; {convert}type "
            f"{', or '.join([*ways, f'{ignore} to train without {them}'])} "
            f'("data.ignore_columns=[{REST}]": without all that nothing reads)',
        )
        self.refusal.names, self.refusal.read = names, self.columns(used=True)
        if self.answers:
            raise self.refusal


def known_as(name: str) -> list[str]:
    """Return the parts of a row whose words, and no others, make up the name of a column."""
    words = set(split_name(name))
    bare = words - {"response", "is", "tag", "message", "key", "content"} or words
    return [ours for ours, heard in WORDS.items() if bare <= set(heard.partition("|")[0].split())]


def sounds_as(words: Iterable[str]) -> list[str]:
    """Return the parts of a row that have one of these words."""
    return [ours for ours, heard in WORDS.items() if not set(heard.split()).isdisjoint(words)]


def split_name(name: str) -> list[str]:
    """Return the words of a column's name, in small letters."""
    return re.split(r"[\W_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())


def naming(values: Values) -> list[Any]:
    """Return the values of a row that may name one of its choices, by letter or number."""
    return [cell for name, cell in values.items() if known_as(name) or not str(cell).isdecimal()]


def families(values: Values) -> set[str]:
    """Return the columns whose texts are choices: a ``_series`` of which another column names one."""
    series, others = _series(name for name, cell in values.items() if isinstance(cell, str)), naming(values)
    of_choices = [marks for marks in series if choices([values[name] for name in marks.values()], others)]
    return {name for marks in of_choices for name in marks.values()}


def of_choices(values: Values) -> list[str]:
    """Return the columns that hold choices of which another column names one."""
    lists = [name for name, cell in values.items() if holds(cell, naming(values)) == "choices"]
    return lists or sorted(families(values))


TO_CONVERT = "write rows of prompt (the question and the choices {}) and completion (the right one in words)"
"""What to do with choices that no column here can mean."""


def unread_keys(cell: Any) -> list[str]:
    """Return the keys of messages that nothing reads."""
    entries = unpacked(cell) if holds(cell) == "turns" else []
    messages = entries if isinstance(entries, list) else [entries]
    every = (key for message in messages for key, value in message.items() if not is_empty(value))
    return [key for key in every if key not in READ_KEYS and not THOUGHT.fullmatch(key)]


def _is_answer(name: str) -> bool:
    parts = "chosen", "rejected", "completions", "completion", "conversation"
    return any(name in READ[part] for part in parts) or ONE_OF_TWO.fullmatch(name) is not None


def shortened(value: Any) -> str:
    """Return the first words of a value."""
    return reprlib.repr(" ".join(piece for piece in pieces(unpacked(value)) if piece != NO_TEXT) or value)


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


# What to type: found by names and by what columns hold, and tried on the first rows before it is shown


Trial = Callable[[Mapping[str, str]], Sequence[str] | None]
NAMED, GUESSED, HELD = -2, -1, 2
"""What it costs that a place is a part by its name, by a word of its name, or by what it holds alone."""
_MOST, _PLACES, _PARTS = 150, 16, 4
"""Ways that are tried, places that these may name, and parts that one names at the most."""
_ORDER = ("system", "instruction", "input", "prompt", "chosen", "rejected")


def proposal(rows: Sequence[Row], config: DataConfig, names: Sequence[str], unread: Trial) -> str:
    """Return the settings to type so that the columns ``names``, which nothing reads, are read; "" where
    nothing works. ``unread`` gives the columns that decide and are not read with other ``data.columns``; None
    where the rows cannot be read so."""
    best = _best(rows, _ways(rows, config, names), unread)
    lettered = {*of_choices(rows[0].values)}
    if best is None or (lettered and lettered.isdisjoint(map(_column, best[1].values()))):
        return ""
    line = typed(dict(sorted(best[1].items(), key=lambda item: [*_ORDER, item[0]].index(item[0]))))
    without = [*(config.ignore_columns or ()), *dict.fromkeys(map(_column, best[0]))]
    return f"{line} {ignoring(without)}" if best[0] else line


def _best(
    rows: Sequence[Row], ways: Iterable[tuple[int, dict[str, str]]], unread: Trial
) -> tuple[Sequence[str], dict[str, str]] | None:
    """Return (columns that decide and stay unread, data.columns) of the way that leaves the fewest of them;
    None where no way reads the rows' texts."""
    best: tuple[Sequence[str], dict[str, str]] | None = None
    for _, way in sorted(ways, key=lambda way: way[0])[:_MOST]:
        left = unread(way)
        texts = any({*pieces(at(row.values, name)[0])} - {NO_TEXT} for row in rows for name in left or ())
        if left is not None and not texts and (best is None or len(left) < len(best[0])):
            best = left, way
            if not left:
                break
    return best


def _ways(
    rows: Sequence[Row], config: DataConfig, names: Sequence[str]
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield (cost, data.columns) that may read the rows: parts of a row at the places that may be them."""
    has = {name: cell for row in rows for name, cell in row.values.items() if not is_empty(cell)}
    ours = config.columns or {}
    asks = next((n for n in READ["prompt"] if isinstance(has.get(n), str | list)), ours.get("prompt", ""))
    native = {part for part in WORDS if has.keys() & {part, *READ.get(part, ())}} | ours.keys()
    native -= set() if asks else {"prompt"}
    found: list[tuple[int, str, int, str]] = []
    lost = {ours.get(column, column) for column in names}
    for name, cell in has.items():
        for place, value in () if name in ours.values() else _places(name, cell):
            for part, cost in _parts_of(place, value, has.values() if name in lost else None):
                if part not in native:
                    found.append((cost, part, -len(str(value)), place))
    found.sort(key=lambda one: (one[0], [*WORDS].index(one[1]), one[2]))
    for size in range(1, _PARTS + 1):
        for picked in itertools.combinations(found[:_PLACES], size):
            way = {part: place for _, part, _, place in picked}
            apart = len(way) == size == len({*map(_column, way.values())})
            if "input" in way and "instruction" not in has:  # it follows an instruction alone
                way["instruction"] = way.pop("prompt", asks)
            if apart and "" not in way.values() and sum(cost > GUESSED for cost, *_ in picked) < 2:
                way = {part: place for part, place in way.items() if part != place}
                yield sum(cost for cost, *_ in picked), ours | way


def _places(path: str, value: Any, depth: int = 2) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of a column and of what lies inside it, at keys of objects and in a list of one."""
    inner = unpacked(value)
    if isinstance(inner, list) and inner and all(entry == inner[0] for entry in inner):
        inner = {"0": inner[0]}
    if depth == 2 or not isinstance(inner, Mapping) or holds(inner):
        yield path, value
    if depth and isinstance(inner, Mapping) and holds(value) not in ("turns", "tools"):
        for key, one in inner.items():
            yield from () if is_empty(one) else _places(f"{path}.{key}", one, depth - 1)


def _parts_of(place: str, value: Any, others: Iterable[Any] | None) -> Iterator[tuple[str, int]]:
    """Yield the parts of a row that a value may be, each with its cost: by its name and, where nothing reads
    it, by what it holds beside ``others`` (None: it is read)."""
    names = place.split(".")
    heard = {word for name in names for word in split_name(name)}
    if ONE_OF_TWO.fullmatch(names[0]):
        return
    yield "winner", GUESSED
    if heard & {"id", "idx", "index", "uuid", "hash"}:
        return
    by_name = [part for name in names for part in known_as(name) if part != "winner"]
    guessed = sounds_as(heard)[:1]
    if heard & {"non", "not", "un"} and guessed == ["chosen"]:
        by_name, guessed = [], ["rejected"]
    if "reference" in by_name and len(words(str(value))) == 1:  # a number, a letter or a word: a verdict
        by_name = ["reference"]
    yield from ((part, NAMED) for part in by_name)
    yield from ((part, GUESSED) for part in guessed if not by_name)
    kind, unread = holds(value, others or ()), others is not None
    if kind == "turns":
        yield from (("prompt", HELD), ("chosen", HELD), ("rejected", HELD), ("history", HELD + 1))
    elif kind in ("choices", "tools") and unread:
        yield ("input" if kind == "choices" else "tools"), HELD
    elif unread and not by_name and not guessed:
        several = isinstance(value, str) and len(words(value)) > 1
        texts = ("prompt", "input", "completion", "chosen", "rejected", "system") if several else ("input",)
        yield from ((part, HELD + (part != "prompt")) for part in texts)
