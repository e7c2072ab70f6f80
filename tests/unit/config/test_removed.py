"""Names that are gone: whoever types one reads one sentence, and nothing in the project still has one."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from common.errors import UserError
from config import removed as table
from config.cli import compose, refuse_foreign
from config.composing import composed
from config.files import FOLDER, parsed
from config.load import load
from config.removed import SENTENCE, refuse_command, removed
from launch.grid import read_sweep
from launch.slurm import make_job
from tests.tiny import ROOT
from tests.unit.test_architecture import tracked

ROWS = parsed((FOLDER / "removed.yaml").read_text(encoding="utf-8")) or []
NAMES = [name for row in ROWS for name in row["gone"]]
COMMANDS = ("benchmarks", "jobs", "launch", "study", "tools")
"""Packages that have, or had, commands"""
FROZEN = ("CHANGELOG.md", "benchmarks/RESULTS.md", "config/removed.yaml", "docs/gpus", "docs/study/")
"""What may say a name that is gone: the table, and pages and records of their time"""
SAID = SENTENCE.format(was="a number", instead="nothing")
GONE = ("old", "lr.old", "loss=old", "rollouts.old", "jobs.old", "sweeps/old.yaml", "make old", "slurm.old")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8", errors="ignore")


def refusal(word: str) -> str:
    with pytest.raises(UserError) as refused:
        refuse_foreign([word])
    return str(refused.value)


def command_refused(name: str | None, capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        refuse_command(name)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_gone_is_refused_as_it_was_typed(name, capsys, monkeypatch):
    if name.startswith("make "):
        rule = re.search(rf"^[\w -]*\b{name[5:]}\b[\w -]*:.*\n\t(.*)", read("Makefile"), re.MULTILINE)
        assert rule is not None and "config.removed" in rule[1]
        assert removed()[name] in command_refused(name, capsys)
    elif "/" in name:
        with pytest.raises(UserError, match=re.escape(removed()[name])):
            read_sweep(Path(name))
    else:
        assert removed()[name] in refusal(name if "=" in name else f"{name}=1")
        first = name.partition(".")[0]
        if first in COMMANDS and "=" not in name:
            monkeypatch.setattr(sys, "orig_argv", ["python", "-m", *name.split(), "--help"])
            assert removed()[name] in command_refused(None, capsys)
            assert "refuse_command()" in read("study.py" if first == "study" else f"{first}/__init__.py")


def test_nothing_in_the_project_has_a_name_that_is_gone():
    """Words that are no dotted key, path or choice are looked for among the settings alone."""
    files = {str(path.relative_to(ROOT)) for path in tracked()}
    binary = (".png", ".safetensors", ".gz", ".parquet")
    texts = {name: read(name) for name in files if not name.startswith(FROZEN) and not name.endswith(binary)}
    for name in NAMES:
        if re.search(r"[.=/ ]", name):
            whole = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")
            assert [path for path, text in texts.items() if name in text and whole.search(text)] == [], name
        else:
            assert OmegaConf.select(composed([]), name) is None, name


@pytest.fixture
def sample(monkeypatch):
    monkeypatch.setattr(table, "removed", lambda: dict.fromkeys(GONE, SAID))


TYPED = {
    "old=1": "old=1: is gone: it was a number; instead: nothing; the last commit",
    "old.part=2": "old.part=2: old is gone",
    "loss=old": "loss=old: is gone",
    "loss=[dpo, old]": "loss=[dpo, old]: loss=old is gone",
    "sampler._target_=rollouts.old.Sampler": "rollouts.old is gone",
    "data.path=sweeps/old.yaml": "sweeps/old.yaml is gone",
}


@pytest.mark.usefixtures("sample")
def test_a_setting_its_section_a_value_and_an_import_path_are_refused():
    for word, says in TYPED.items():
        assert says in refusal(word)
        with pytest.raises(UserError, match=re.escape(says)):
            compose(word)


@pytest.mark.usefixtures("sample")
def test_files_of_settings_sweeps_and_jobs_are_refused_alike(tmp_path):
    refused = pytest.raises(UserError, match="is gone: it was a number")
    with refused:
        load({**OmegaConf.to_container(composed([])), "old": {"part": 1}})
    for line in ("old: 1", "base: {old: 1}", "grid: {loss: [dpo, old]}", "cells: {a: {old.part: 1}}"):
        (tmp_path / "mine.yaml").write_text(f"{line}\nseeds: [1]\n")
        with refused:
            read_sweep(tmp_path / "mine.yaml")
    with refused:
        make_job({"old": 1})
    (tmp_path / "experiment").mkdir()
    override = "# @package _global_\ndefaults:\n  - override /loss: old\n  - _self_\n"
    (tmp_path / "experiment/mine.yaml").write_text(override)
    with refused:
        compose("--config-dir", str(tmp_path), "experiment=mine")
    assert compose("exp_name=old", "wandb.project=old.of-mine")[0].exp_name == "old", "another text"
