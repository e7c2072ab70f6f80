"""The doctor: each check finds what it is there for, and says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from config.cli import compose_config
from launch import doctor
from launch.doctor import BAD, OK, packages, run, runs_folder, why

pytestmark = pytest.mark.usefixtures("quick_python")


def test_packages_that_cannot_be_imported_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "GPUS", "raise ImportError('no torch')")
    finding = packages()
    assert finding.level == BAD and "no torch" in finding.text and "make venv" in finding.remedy


def test_the_folder_of_runs(tmp_path: Path) -> None:
    assert runs_folder(compose_config([f"runs_dir={tmp_path}/not/yet/there"])).level == OK
    (tmp_path / "file").touch()
    finding = runs_folder(compose_config([f"runs_dir={tmp_path}/file/runs"]))
    assert finding.level == BAD and "runs_dir" in finding.remedy


def test_what_a_process_said_last() -> None:
    assert why("") == "no output"
    assert run("x", ["sleep", "5"], 1) == (124, "no end after 1 seconds")


def test_settings_that_cannot_be_honoured(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["lr=-1"]) == 2
    assert "lr=-1" in capsys.readouterr().err
