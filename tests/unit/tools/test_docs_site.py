"""The documentation as a site: it builds without a warning, and links to code lead where the code is shown.
The pages that are made from the code are as the code is now."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import yaml

from tests.tiny_files import ROOT
from tools.reference import PAGES

SHOWN = "https://example.org/humanline"
SAID = {f"{group}.name" for group in ("data", "loss", "sampler", "reward")}
SAID |= {"loss._target_", "reward.judge.max_score", "reward.weighted.parts"}
"""Settings whose name, or the row above, says what they are."""


def test_every_page_is_there_in_the_sites_order_and_links_to_code_lead_to_it(tmp_path):
    site = tmp_path / "site"
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(site)]
    env = os.environ | {"REPO_URL": SHOWN}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {p.relative_to(ROOT / "docs").with_suffix("") for p in (ROOT / "docs").rglob("*.md")}
    for page in pages - {Path("README")}:
        assert (site / page / "index.html").is_file()
    text = re.sub(r"!ENV \[[^\]]*\]", "null", (ROOT / "mkdocs.yml").read_text())
    parts = [of for part in yaml.safe_load(text)["nav"] for of in part.values()]
    named = [page for of in parts for page in ([of] if isinstance(of, str) else of)]
    assert sorted(named) == sorted(f"{page}.md" for page in pages)
    shown = (site / "tour" / "index.html").read_text()
    linked = re.findall(rf'href="{SHOWN}/blob/main/([^"#]+)["#]', shown)
    assert "trainers/humanline.py" in linked and all((ROOT / path).is_file() for path in linked)


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
