"""Text of unknown origin in a Markdown page: shown as it is, and nothing but shown."""

from __future__ import annotations

import html

from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.markdown import literal, table


@settings(max_examples=40, deadline=None)
@given(st.text())
@example("<svg onload=alert(1)> [click](javascript:alert(1)) `code` | cell \\| cell &lt;img&gt; &#60;b&#62;")
@example("a\n\n# heading\n---\n<b>")
def test_any_text_is_shown_on_one_printable_line_and_does_nothing(text):
    made = literal(text)
    made.encode()
    assert made.isprintable() and not set(made) & set("<>`[]|\\*")
    if (line := " ".join(text.split())).isprintable():
        assert html.unescape(made) == line
    assert html.unescape(literal("a\x1b[2J\u202eb\ud800")) == "a\\u001b[2J\\u202eb\\ud800"


def test_what_stands_in_a_cell_ends_none():
    assert table(("a", "b"), [(1, "x|y\nz"), ("", None)]).splitlines()[2:] == [
        "| 1 | x\\|y<br>z |",
        "| | None |",
    ]
