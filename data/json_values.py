"""JSON values as data files hold them, read one at a time, each with the reason why it cannot be used: a text
that is no valid text, a number that Python cannot hold, nesting too deep for recursion."""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Any

MOST_NESTED = 100
"""Levels of lists and objects in one row. Deeper nesting is not sensible data, and Python's own recursion
ends at about ten times this depth."""
_HALF_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
"""Half of a surrogate pair, as JSON escapes it. Two halves make one character, so a match only calls for a
closer check."""
_BRACKETS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
"""A text, whole or cut off by the end, or a bracket outside of texts."""
_DECODER = json.JSONDecoder()
LARGEST = 3.4028234663852886e38
"""The largest finite number of float32."""


def parsed(text: str, at: int) -> tuple[Any, int, str | None]:
    """Return (value, its end, the reason why it cannot be used or None) of the JSON that begins at ``at``.
    Raises JSONDecodeError if the text is not JSON."""
    deep = f"nested more than {MOST_NESTED} levels deep"
    try:
        value, end = _DECODER.raw_decode(text, at)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        return None, _extent(text, at)[0], deep
    except ValueError:
        digits = sys.get_int_max_str_digits()
        return None, _extent(text, at)[0], f"an integer has more than {digits} digits"
    if (
        text.count("[", at, end) + text.count("{", at, end) > MOST_NESTED
        and _extent(text, at)[1] > MOST_NESTED
    ):
        return None, end, deep
    if _HALF_ESCAPE.search(text, at, end) and not is_text(json.dumps(value, ensure_ascii=False)):
        return None, end, "a text has half of a surrogate pair, which is no character"
    return value, end, None


def _extent(text: str, at: int) -> tuple[int, int]:
    """Return (the end, how deeply lists and objects are nested) of the JSON that begins at ``at``. Raises
    JSONDecodeError if it has no end."""
    if text[at] not in "[{":
        bare = re.compile(r"[^\s,\]}]+").match(text, at)
        return (bare.end() if bare else at), 0
    depth = most = 0
    for match in _BRACKETS.finditer(text, at):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match[0], 0)
        most = max(most, depth)
        if depth == 0:
            return match.end(), most
    raise json.JSONDecodeError("Unterminated list or object starting at", text, at)


def is_text(text: str) -> bool:
    """Return whether ``text`` is valid. Half a surrogate pair is not a character, and neither a tokenizer nor
    a file accepts it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def are_finite(numbers: list[Any], most: float = LARGEST) -> bool:
    """Return whether all ``numbers`` are numbers that are finite in float32, in which they are computed with,
    and at most ``most``. No Python runs for each of them: there are as many as tokens."""
    if not all(issubclass(kind, int | float) for kind in set(map(type, numbers))):
        return False
    inside = not numbers or (min(numbers) >= -LARGEST and max(numbers) <= most)
    return inside and all(map(math.isfinite, numbers))
