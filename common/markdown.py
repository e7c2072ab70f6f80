"""Text of unknown origin in pages that are made as Markdown."""

from __future__ import annotations

_MARKUP = {ord(character): f"&#{ord(character)};" for character in "\\`*[]|"}
_MARKUP |= {ord("&"): "&amp;", ord("<"): "&lt;", ord(">"): "&gt;"}


def literal(text: str) -> str:
    """``text`` on one line as Markdown that shows it and does nothing else: no HTML, link, image, code or new
    cell of a table.

    Entities are used throughout, since an escaping backslash may itself be escaped by what stands before it.
    Characters that cannot be seen (control characters, turned writing directions, half surrogate pairs) are
    shown by their numbers.
    """
    seen = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in " ".join(text.split()))
    return seen.translate(_MARKUP)
