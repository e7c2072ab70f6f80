"""The pages of docs/ that are made from the code: as the code is now, and without a gap."""

from __future__ import annotations

import re
from pathlib import Path

from tools.reference import PAGES, settings_of

SAID = {f"{group}.name" for group in ("data", "loss", "sampler", "reward")}
SAID |= {"loss._target_", "reward.judge.max_score", "reward.weighted.parts"}
"""Settings whose name, or the row above, says what they are."""
ROOT = Path(__file__).parents[3]


def test_the_made_pages_are_up_to_date():
    stale = [name for name, page in PAGES.items() if (ROOT / "docs" / name).read_text() != page()]
    assert stale == [], "run python -m tools.reference"


def test_every_setting_stands_once_on_the_page():
    """Explained, among those of a run, and among those of each other program; at most 330 in all."""
    count = 0
    for part in (ROOT / "docs" / "settings.md").read_text().split("\n## ")[1:]:
        rows = re.findall(r"^\| `([^`]+)`", part, re.MULTILINE)
        assert rows and sorted({*rows}) == sorted(rows)
        assert {*re.findall(r"^\| `([^`]+)`.*\|  \|$", part, re.MULTILINE)} <= SAID
        count += len(rows)
    assert count <= 330


def test_comments_go_on_over_lines_and_sections_nest():
    text = "# -- one part -----\na: 1   # first\n        # second\nb:   # of b\n  c: [x, y]  # of c\n"
    assert [(part, s and tuple(s)) for part, s in settings_of(text)] == [
        ("one part", None),
        ("one part", ("a", "1", "first second")),
        ("one part", ("b", "", "of b")),
        ("one part", ("b.c", "[x, y]", "of c")),
    ]
