"""The doctor: each check finds what it is there for, and says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import doctor
from launch.composing import compose_config
from launch.doctor import BAD, OK, disk, last, run, talk

pytestmark = pytest.mark.usefixtures("quick_python")


def test_ranks_reach_each_other() -> None:
    finding = talk(2, "gloo")
    assert finding.level == OK, finding


def test_ranks_that_do_not_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "RANKS", "raise RuntimeError('no route')")
    finding = talk(2, "gloo")
    assert finding.level == BAD and "no route" in finding.text and "SOCKET_IFNAME" in finding.remedy


def test_disk(tmp_path: Path) -> None:
    config = compose_config([f"runs_dir={tmp_path}/not/yet/there", "keep_checkpoints=2"])
    assert disk(config, 1e6).level == OK
    full = disk(config, 8e15)
    assert full.level == BAD and "keep_checkpoints" in full.remedy
    assert "320.0" in disk(config, 8e9).text, (
        "8B: three checkpoints of weights and two moments, and the model: 8 x (3 x 12 + 4) GB"
    )


def test_what_a_process_said_last() -> None:
    assert last("a\nTraceback\n[rank1]: ValueError: this\nChildFailedError:\n=====\n") == "ValueError: this"
    assert last("x\n----\n") == "x" and last("") == "no output"
    assert run("x", ["sleep", "5"], 1) == (124, "no end after 1 seconds")


def test_settings_that_cannot_be_honoured(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["lr=-1"]) == 2
    assert "lr=-1" in capsys.readouterr().err
