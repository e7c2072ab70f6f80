"""What the README and the docs say exists, exists; the commands they give compose."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.tiny import ROOT, make_config

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = sorted(
    {
        line.partition("#")[0].strip()
        for page in PAGES
        for line in page.read_text().splitlines()
        if re.match(r"\s+(python|torchrun|accelerate launch).* ?train\.py [a-z]", line) and "…" not in line
    }
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_composes(command):
    words = shlex.split(command.partition("train.py")[2])
    make_config(*(word for word in words if "=" in word))


def test_the_readme_gives_commands():
    assert len(COMMANDS) >= 6


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


def test_the_map_of_the_tree_is_that_of_the_tree():
    part = (ROOT / "README.md").read_text().partition("## Map")[2].partition("## From")[0]
    folder = ""
    for line in part.splitlines():
        if found := re.match(r"    (\w+)/(?: |$)", line):
            folder = found[1]
            assert (ROOT / folder).is_dir()
        elif line.startswith("      "):
            for name in re.findall(r"\b[\w/]+\.py\b", line):
                assert (ROOT / folder / name).is_file(), name
        else:
            for name in re.findall(r"\b\w+\.py\b", line):
                assert (ROOT / name).is_file(), name


def test_the_make_targets_are_there():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert (
        set(re.findall(r"(?:`|^    )make ([a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
        <= targets
    )
