"""Tables of pages that are written as Markdown, and escaping of text of unknown origin for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_MARKUP = {ord(character): f"&#{ord(character)};" for character in "\\`*[]|"}
_MARKUP |= {ord("&"): "&amp;", ord("<"): "&lt;", ord(">"): "&gt;"}


def literal(text: str) -> str:
    """Return ``text`` on one line as Markdown that shows it literally: no HTML, link, image, code or new cell
    of a table.

    Entities are used throughout, since an escaping backslash may itself be escaped by the character before
    it. Invisible characters (control characters, changes of the writing direction, half surrogate pairs) are
    shown by their numbers.
    """
    seen = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in " ".join(text.split()))
    return seen.translate(_MARKUP)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table whose cells are Markdown already; a bar or the end of a line in one ends no cell."""
    cells = ([str(one).replace("|", "\\|").replace("\n", "<br>") for one in row] for row in (header, *rows))
    lines = ["|" + "|".join(f" {cell} " if cell else " " for cell in row) + "|" for row in cells]
    lines.insert(1, "|" + "---|" * len(header))
    return "\n".join(lines)
