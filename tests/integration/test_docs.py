"""What README.md and docs/*.md name is there; the settings of their tables compose. Their commands:
test_docs_commands.py."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.docs import PAGES, ROOT, settings
from tests.tiny import compose_config

TABLES = {"from-halos-and-trl.md": "", "losses.md": "loss=grpo", "syncing.md": ""}
"""Pages whose tables name settings -> what those settings are for, where they do not say it themselves."""
NO_SETTINGS = ("num_labels=1",)
SETTINGS = [(page, text) for page in TABLES for text in settings(page) if text not in NO_SETTINGS]


@pytest.mark.parametrize(("page", "text"), SETTINGS)
def test_the_settings_of_the_tables_compose(page, text):
    own = shlex.split(text)
    before = [] if any(word.startswith("loss=") for word in own) else TABLES[page].split()
    compose_config([*before, *own])


def test_there_are_settings_to_test():
    assert len(settings("from-halos-and-trl.md")) > 40


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_is_named_is_there(page):
    text = page.read_text()
    named = re.findall(
        r"`((?:config|data|models|trainers|rollouts|launch|tests|tools|docs|sweeps)/[\w./-]+)`", text
    )
    linked = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    missing = [n for n in named if not (ROOT / n).exists()] + [
        n for n in linked if not (page.parent / n).exists()
    ]
    assert not missing


def test_the_folders_of_the_readme_are_those_of_the_tree():
    part = (ROOT / "README.md").read_text().partition("## The folders")[2].partition("\n## ")[0]
    named = set(
        re.findall(r"(\w+)/", "\n".join(line for line in part.splitlines() if line.startswith("    ")))
    )
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tools"}
    assert packages <= named
    assert all(
        (ROOT / name).is_dir() or (ROOT / "trainers" / name).is_dir() or (ROOT / "rollouts" / name).is_dir()
        for name in named
    )


def test_the_make_targets_are_there():
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        name for page in PAGES for name in re.findall(r"(?:`|^    )make ([a-z0-9-]+)", page.read_text(), re.M)
    }
    assert named <= targets
