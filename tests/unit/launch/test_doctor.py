"""The doctor: each check finds what it is there for, and says what to do."""

from __future__ import annotations

from config.cli import compose_config
from launch import doctor
from launch.doctor import BAD, OK, packages, run, runs_folder


def test_what_is_not_as_it_must_be_is_reported_with_the_remedy(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(doctor, "GPUS", "raise ImportError('no torch')")
    level, text = packages()
    assert level == BAD and "no torch" in text and "make venv" in text
    assert runs_folder(compose_config([f"runs_dir={tmp_path}/not/yet/there"]))[0] == OK
    (tmp_path / "file").touch()
    level, text = runs_folder(compose_config([f"runs_dir={tmp_path}/file/runs"]))
    assert level == BAD and "runs_dir=" in text
    assert run("x", ["sleep", "5"], 1) == (124, "no end after 1 seconds")
    assert doctor.main(["lr=-1"]) == 2
    assert "lr=-1" in capsys.readouterr().err
