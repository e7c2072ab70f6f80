"""A disk without room: what a run has is kept, it is said, and the same command goes on when there is
room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError, StoppedError
from jobs.job import Job
from jobs.watch import RunWatch
from tests.full_disk import FILLER, fill, mounted, set_limit
from tests.integration.online import cut_off
from tests.integration.test_damage import OFFLINE, go
from tests.integration.test_kills import same
from tests.tiny_files import everything


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("runs")
    go(folder, "whole", *OFFLINE)
    return folder


@pytest.fixture(autouse=True)
def _room_again() -> Iterator[None]:
    yield
    set_limit(None)


def before_steps(patch: pytest.MonkeyPatch, what: Callable[[int], None]) -> None:
    """Have ``what`` called with each step's number before the step."""
    real = RunWatch.before_step

    def before_step(self: RunWatch, segment: Any) -> None:
        what(self.trainer.progress.step)
        real(self, segment)

    patch.setattr(RunWatch, "before_step", before_step)


def test_a_disk_that_is_full_for_a_while_costs_checkpoints_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From step 2 no file may grow beyond 20,000 bytes (no checkpoint fits), from 5 beyond 1,500 (no line
    does)."""
    limits = {2: 20_000, 5: 1_500, 8: None}
    before_steps(monkeypatch, lambda step: set_limit(limits[step]) if step in limits else None)
    go(folder, "full", *OFFLINE, "keep_checkpoints=9")
    same(folder / "full", folder / "whole")
    kept = [int(path.name[5:]) for path in sorted((folder / "full" / "checkpoints").iterdir())]
    assert kept == [0, 9, 12]
    out = capsys.readouterr().out
    assert out.count("the run goes on, the checkpoints before it stay") == 2
    assert "File too large" in out and "metrics.jsonl: [Errno 27]" in out and "Traceback" not in out


def test_whatever_finds_no_room_the_same_command_goes_on_when_there_is_some(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before it trains; killed while it trains on; at its end."""
    finish = Job.finish

    def finish_without_room(self: Job, *of: Any) -> Any:
        set_limit(20_000)
        return finish(self, *of)

    with monkeypatch.context() as patch:
        before_steps(patch, lambda step: set_limit(20_000))
        with pytest.raises(StoppedError, match=r"step_00000000 could not be written"):
            go(folder, "short", *OFFLINE)
    set_limit(None)
    with cut_off(8) as patch:
        before_steps(patch, lambda step: set_limit(1_500) if step == 5 else None)
        go(folder, "short", *OFFLINE, "resume=true")
    set_limit(None)
    with monkeypatch.context() as patch:
        patch.setattr(Job, "finish", finish_without_room)
        with pytest.raises(StoppedError, match=r"what it leaves could not be written .* resume=true"):
            go(folder, "short", *OFFLINE, "resume=true")
    set_limit(None)
    left = {path.name for path in (folder / "short").iterdir()}
    assert not left & {"model", ".model.part", "summary.json"}
    go(folder, "short", *OFFLINE, "resume=true")
    same(folder / "short", folder / "whole")


def test_a_disk_that_is_full_when_a_run_goes_on_costs_it_nothing(folder: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "64m") as disk:
        with cut_off(8):
            go(disk, "run", *OFFLINE)
        kept, record = everything(disk / "run" / "checkpoints"), (disk / "run" / "config.yaml").read_bytes()
        fill(disk)
        with pytest.raises((OSError, ConfigError)):
            go(disk, "run", *OFFLINE, "resume=true")
        assert (disk / "run" / "config.yaml").read_bytes() == record
        assert everything(disk / "run" / "checkpoints") == kept
        (disk / FILLER).unlink()
        go(disk, "run", *OFFLINE, "resume=true")
        same(disk / "run", folder / "whole")
