"""The guide's right-hand columns and commands: every setting that it names composes, every command is planned on the embedded task."""

from __future__ import annotations

import re
import shlex

import pytest

from jobs.job import Job
from jobs.run_folder import RunFolder
from models.distributed import start
from tests.tiny import ROOT, make_config

GUIDE = (ROOT / "docs" / "from-halos-and-trl.md").read_text()
COMMANDS = [
    line.removeprefix("python train.py ")
    for line in GUIDE.splitlines()
    if line.startswith("python train.py ")
]
SETTING = re.compile(r"^[a-zA-Z_]\w*(\.\w+)*=\S")


def settings_of_tables() -> list[str]:
    """What stands in code in the last column of a table and starts like a setting."""
    found = []
    for line in GUIDE.splitlines():
        if line.startswith("|") and not line.startswith("|---"):
            last = line.rstrip("| ").rpartition(" | ")[2]
            found += [code for code in re.findall(r"`([^`]+)`", last) if SETTING.match(code)]
    return list(dict.fromkeys(found))


def test_there_is_something_to_test():
    assert len(COMMANDS) > 20 and len(settings_of_tables()) > 40


@pytest.mark.parametrize("text", settings_of_tables())
def test_every_setting_of_the_tables_composes(text):
    make_config(*shlex.split(text))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_planned(command, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = make_config(*shlex.split(command), "dry_run=true", f"runs_dir={tmp_path}")
    job = Job(config, RunFolder(config, "guide"), start())
    try:
        assert job.describe()["steps"] >= 10
    finally:
        job.close()
    assert not list(tmp_path.iterdir())
