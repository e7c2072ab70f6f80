"""JSON values as data files hold them, each with the reason why it cannot be used: a text that is no valid
text, a number that Python cannot hold, nesting too deep for recursion."""

from __future__ import annotations

import ast
import json
import math
import re
import string
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

MOST_NESTED = 100
"""Levels of lists and objects in one row. Deeper nesting is not sensible data, and Python's own recursion
ends at about ten times this depth."""
_TOO_DEEP = f"nested more than {MOST_NESTED} levels deep"
_HALF_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
"""Half of a surrogate pair, as JSON escapes it. Two halves make one character, so a match only calls for a
closer check."""
LARGEST = 3.4028234663852886e38
"""The largest finite number of float32."""


def parsed(text: str) -> tuple[Any, str | None]:
    """Return (value, the reason why it cannot be used or None) of a text that is JSON and nothing else.
    Raises JSONDecodeError for another text."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        return None, _TOO_DEEP
    except ValueError:
        return None, f"an integer has more than {sys.get_int_max_str_digits()} digits"
    deep, halves = text.count("[") + text.count("{") > MOST_NESTED, _HALF_ESCAPE.search(text) is not None
    return value, fault_of(value, halves) if deep or halves else None


def fault_of(value: Any, halves: bool = True) -> str | None:
    """Return why a value of JSON cannot be used; None if it can. ``halves``: whether its texts may hold half
    of a surrogate pair."""
    if _depth(value) > MOST_NESTED:
        return _TOO_DEEP
    return no_text(json.dumps(value, ensure_ascii=False)) if halves else None


def _depth(value: Any) -> int:
    """Return how deeply lists and objects are nested."""
    level, depth = [value], 0
    while level := [one for one in level if isinstance(one, list | dict)]:
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
        depth += 1
    return depth


def whole(text: str, what: str = "a text") -> Any:
    """Return the value of a text that is JSON and nothing else. Raises ValueError with the reason why there
    is none, of ``what`` it is."""
    try:
        value, fault = parsed(text)
    except ValueError:
        value, fault = None, "it is no JSON"
    if fault is not None:
        raise ValueError(f"{what} cannot be used: {fault}")
    return value


def unpacked(cell: Any) -> Any:
    """Return the list or object that a whole text is as JSON, or as Python writes it (pandas does); another
    value as it is."""
    if isinstance(cell, str) and cell.lstrip().startswith(("[", "{")):
        for read in (str, lambda text: json.dumps(ast.literal_eval(text.strip()))):
            with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                return whole(read(cell))
    return cell


def no_text(text: str) -> str | None:
    """Return why ``text`` is not valid; None if it is. Half a surrogate pair is not a character, and neither
    a tokenizer nor a file accepts it; some stand for bytes that are not UTF-8 (PEP 383)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) - 0xDC00
        half = "a text has half of a surrogate pair, which is no character"
        return f"the byte 0x{byte:02x} is not UTF-8" if 0x80 <= byte <= 0xFF else half
    return None


def are_finite(numbers: list[Any], most: float = LARGEST) -> bool:
    """Return whether all ``numbers`` are numbers that are finite in float32, in which they are computed with,
    and at most ``most``. No Python runs for each of them: there are as many as tokens."""
    if not all(issubclass(kind, int | float) for kind in set(map(type, numbers))):
        return False
    inside = not numbers or (min(numbers) >= -LARGEST and max(numbers) <= most)
    return inside and all(map(math.isfinite, numbers))


# What values hold, whatever their columns are called, and whether others say the same

LONG = 8
"""Words of a text that may decide what is trained on, and of a stretch that two texts share."""
ALIKE = 0.8
"""Share of the stretches of a text, or of the rows of a column, that are read elsewhere where it counts as
read."""
NO_TEXT = "\0"
"""A character that no text has. Two numbers that are alike do not say the same."""
_UNSPACED = re.compile(r"[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]")
_WORD = re.compile(rf"{_UNSPACED.pattern}|[^\s{_UNSPACED.pattern[1:-1]}]+")
"""A word; of a script without spaces between words, a character."""
_LETTERED = re.compile(r"\W?[A-Za-z0-9][).:]")


def is_empty(value: Any) -> bool:
    """Return whether a value says nothing: null, NaN (pandas writes it for null), or an empty text, list or
    object."""
    if isinstance(value, float):
        return value != value
    return value is None or (isinstance(value, str | list | dict) and len(value) == 0)


def words(text: str) -> list[str]:
    return _WORD.findall(text) if _UNSPACED.search(text) else text.split()


def pieces(value: Any) -> Iterator[str]:
    """Yield the texts of a value: of messages what they say, not who says it. A number is no text: it yields
    NO_TEXT."""
    if isinstance(value, str):
        yield value.strip()
    elif isinstance(value, Mapping):
        contents = [value[key] for key in ("content", "value") if key in value]
        for inner in contents or value.values():
            yield from pieces(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from pieces(inner)
    elif value is not None:
        yield NO_TEXT


def holds(value: Any, others: Iterable[Any] = ()) -> str:
    """Return what a value is: "turns", "tools" (or a schema), "choices", a "text" of LONG words or more, or
    "". ``others``: the row's other values (``choices``)."""
    value = unpacked(value)
    entries = value if isinstance(value, list) else [value]
    keys = [set(entry) if isinstance(entry, Mapping) else set() for entry in entries]
    for kind, marks in (("turns", {"role", "from"}), ("tools", {"function", "parameters", "properties"})):
        if keys and all(marks & those for those in keys):
            return kind
    if len(choices(value, others)) > 1:
        return "choices"
    return "text" if sum(len(words(piece)) for piece in pieces(value)) >= LONG else ""


def choices(value: Any, others: Iterable[Any] = ()) -> list[str]:
    """Return the texts among which one is to choose, each with its letter: of ``{text: […], label: […]}``,
    ``[{text, label}, …]``, ``{A: …, B: …}``, or a list that has letters or of which one of the row's
    ``others`` names one by letter or number; [] for other values."""
    letters: list[Any] = []
    if isinstance(value, Mapping):
        lists = [inner for inner in value.values() if isinstance(inner, list)]
        letters = next((one for one in lists if _are_marks(one)), [] if lists else list(value))
        texts = next((one for one in lists if one is not letters), list(value.values()))
    else:
        texts = value if isinstance(value, list) else []
        letters = [one.get("label") for one in texts if isinstance(one, Mapping)]
        texts = [one.get("text") if isinstance(one, Mapping) else one for one in texts]
    if not all(isinstance(text, str) for text in texts):
        return []
    if all(map(_LETTERED.match, texts)):
        return texts
    if isinstance(value, list) and not letters and _names_one(others, len(texts)):
        letters = list(string.ascii_uppercase[: len(texts)])
    lettered = len(letters) == len(texts) and _are_marks(letters)
    return [f"{mark}) {text}" for mark, text in zip(letters, texts, strict=True)] if lettered else []


def _are_marks(values: list[Any]) -> bool:
    return all(len(str(value)) == 1 for value in values) and len(set(values)) == len(values)


def _names_one(others: Iterable[Any], count: int) -> bool:
    """Return whether one of the values is the letter or the number of one of ``count`` choices."""
    marks = {*string.ascii_uppercase[:count], *map(str, range(count + 1))}
    scalars = (one for one in others if isinstance(one, str | int) and not isinstance(one, bool))
    return any(str(one).strip("() .").upper() in marks for one in scalars)


def _plain(text: str) -> str:
    return " ".join(words(text))


def _share(text: str, other: str) -> float:
    """Return the share of stretches of LONG words of ``text`` that ``other`` has, of a long one 64."""
    found = words(text)
    starts = range(len(found) - LONG + 1)
    some = [" ".join(found[i : i + LONG]) for i in starts[:: len(starts) // 64 + 1]]
    return sum(stretch in other for stretch in some) / len(some) if some else 0.0


class Said:
    """What values say."""

    def __init__(self, values: Iterable[Any]) -> None:
        said = {_plain(piece) for value in values for piece in pieces(unpacked(value))}
        self._pieces = said - {NO_TEXT, ""}
        self._text = "\n".join(self._pieces)

    def has(self, value: Any) -> bool:
        """Return whether each text of a value stands in one of these, or a long one of these in the value."""
        parts = [_plain(piece) for piece in pieces(unpacked(value)) if piece]
        theirs = "\n".join(parts)
        return all(map(self._repeats, parts)) or any(_share(piece, theirs) >= ALIKE for piece in self._pieces)

    def _repeats(self, piece: str) -> bool:
        if piece in self._pieces or _share(piece, self._text) >= ALIKE:
            return True
        within = rf"(?<!\w){re.escape(piece)}(?!\w)"
        return 1 < len(piece) < 1000 and re.search(within, self._text) is not None
