"""Text of unknown origin in a Markdown page: shown as it is, and nothing but shown."""

from __future__ import annotations

import html

from hypothesis import given, settings
from hypothesis import strategies as st

from common.markdown import literal

HOSTILE = ("<svg onload=alert(1)>", "[click](javascript:alert(1))", "`code` | cell \\| cell")
HOSTILE += ("&lt;img&gt; &#60;b&#62;", "a\n\n# heading\n---\n<b>")


def test_markup_is_shown_and_does_nothing():
    for text in HOSTILE:
        assert html.unescape(literal(text)) == " ".join(text.split())
    assert html.unescape(literal("a\x1b[2J\u202eb\ud800")) == "a\\u001b[2J\\u202eb\\ud800"


@settings(max_examples=40, deadline=None)
@given(st.text())
def test_any_text_is_one_printable_line_without_markup(text):
    made = literal(text)
    made.encode()
    assert made.isprintable() and not set(made) & set("<>`[]|\\*")
