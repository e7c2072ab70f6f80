"""What may be written and deleted in a run's folder, and by whom. Nothing is trained here."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import ConfigError, DataError
from config.load import LOCK, MARKER, RECORD, VERSION, load_run, marked, started
from config.removed import LAST
from config.schema import Config
from evals.targets import settings_of_run
from jobs.online import RoundRecords
from jobs.run_folder import SELECTION, RunFolder
from models import distributed
from rollouts.ledger import RoundFolder
from tests.full_disk import full_disk
from tests.tiny import compose_config
from tests.tiny_files import ROOT, everything


@pytest.fixture
def at(tmp_path):
    """Settings of a run under ``tmp_path``/runs."""

    def make(**settings: object) -> Config:
        return replace(compose_config([]), runs_dir=str(tmp_path / "runs"), **settings)

    return make


def begin(config: Config, name: str = "a", steps: int = 3) -> Path:
    """A run as it lies there when it was killed after so many steps; 0: one that was refused while it
    loaded."""
    folder = RunFolder(config, name)
    folder.claim()
    if steps:
        folder.prepare()
        (folder.path / "checkpoints" / "step_00000000").mkdir(parents=True)
        (folder.path / "checkpoints" / "step_00000000" / "state.json").write_text("{}")
        (folder.path / "metrics.jsonl").write_text('{"step": 0}\n')
    folder.release()
    return folder.path


def refused(config: Config, name: str = "a") -> ConfigError:
    """What a start says that is refused before it has touched anything."""
    here = Path(config.runs_dir)
    before = everything(here.parent)
    with pytest.raises(ConfigError) as error:
        RunFolder(config, name).claim()
    assert everything(here.parent) == before
    return error.value


def overwritten(config: Config, name: str = "a") -> bool:
    """Claim and prepare; returns whether there is still a run to go on with."""
    folder = RunFolder(config, name)
    folder.claim()
    try:
        return folder.prepare()
    finally:
        folder.release()


def test_all_settings_that_are_others_are_said_with_both_values(at):
    begin(at())
    error = refused(at(resume=True, lr=0.5, seed=7, warmup=0.25))
    assert (error.key, error.value) == ("lr", 0.5)
    assert "was 0.0001 when" in error.remedy
    assert "; seed=7 was 1; warmup=0.25 was 0.1, and a run goes on with its settings" in error.remedy
    assert "lr=0.0001 seed=1 warmup=0.1 goes on" in error.remedy


def test_what_changes_nothing_that_is_trained_may_be_another_but_not_the_length(at):
    begin(at())
    assert {"resume=true", "overwrite=true"} <= {*refused(at()).remedy.replace(",", "").split()}
    model = replace(at().model, batch_size=8)
    assert refused(at(model=model, resume=True)).key == "model.batch_size"
    assert overwritten(at(resume=True, eval_every=8, save_every=16))
    begin(at(), "b")
    error = refused(at(resume=True, n_epochs=3), "b")
    assert error.key == "n_epochs" and "start another run from its model (model.name_or_path=" in error.remedy


# -- what may be deleted ---------------------------------------------------------------------------


def without_lock(path: Path) -> dict:
    return {name: value for name, value in everything(path).items() if name != LOCK}


def test_a_run_is_deleted_only_once_it_is_prepared(at, tmp_path):
    path, far = begin(at()), tmp_path / "far"
    far.mkdir()
    (far / "thesis.txt").write_text("mine")
    for link in (path / "checkpoints" / "elsewhere", path / "link"):
        link.symlink_to(far, target_is_directory=True)
    (path / "logs").mkdir()
    (path / "logs" / "reward.log").write_text("of the process that is at work")
    before = without_lock(path)
    folder = RunFolder(at(overwrite=True), "a")
    folder.claim()
    assert without_lock(path) == before
    assert not folder.prepare()
    folder.release()
    assert set(everything(path)) == {LOCK, MARKER, RECORD, "logs/reward.log"}
    assert (far / "thesis.txt").read_text() == "mine"
    assert not started(path) and marked(path)


def test_a_folder_that_is_not_a_run_s_is_neither_written_nor_emptied(at, tmp_path):
    (tmp_path / "precious").mkdir()
    assert refused(at(overwrite=True), "../precious").key == "exp_name", "a name is no path"
    for name in ("run.json", "config.yaml", "metrics.jsonl", "model/a"):
        path = tmp_path / "runs" / "a" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"kind": "my own"}')
        for flags in ({}, {"overwrite": True}, {"resume": True}):
            assert f"no {MARKER}" in refused(at(**flags)).remedy


def test_a_run_that_is_a_link_or_holds_another_is_not_deleted(at, tmp_path):
    path = begin(at())
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    assert "is a link" in refused(at(overwrite=True)).remedy
    assert overwritten(at(resume=True)), "it is gone on with, as ever"
    begin(at(), "b")
    begin(replace(at(), runs_dir=str(tmp_path / "runs" / "b")), "inner")
    assert "another run" in refused(at(overwrite=True), "b").remedy


def test_a_run_of_another_version_does_not_go_on(at):
    path = begin(at())
    text = (path / RECORD).read_text()
    header, _, settings = text.partition("\n")
    assert header == f"# humanline {VERSION}"
    for version, other in (("0.1.0", settings), ("0.3.0", f"# humanline 0.3.0\n{settings}")):
        (path / RECORD).write_text(other)
        said = f"^run={path}: was made by humanline {version}, whose runs {VERSION} does not read; the last"
        for read in (
            RunFolder(at(resume=True), "a").check,
            lambda: load_run(path, trust_remote_code=False),
            lambda: settings_of_run(path, {}, []),
        ):
            with pytest.raises(ConfigError, match=f"{said} commit that does is {LAST}$"):
                read()
    (path / RECORD).write_text(text.replace(VERSION, "0.2.7"))
    assert overwritten(at(resume=True))
    for file in ("pyproject.toml", "CITATION.cff"):
        assert re.search(rf"^version[ =:]+\W?{VERSION}\b", (ROOT / file).read_text(), re.MULTILINE)


# -- starting and going on -------------------------------------------------------------------------


def test_a_start_that_came_to_nothing_does_not_stand_in_the_way(at):
    """Refused after it had chosen its groups and written its settings, or killed there: others may be given
    without a word. One that was refused while it loaded leaves nothing."""
    assert not begin(at(), "refused", steps=0).exists()
    for lr in (0.1, 0.2):
        folder = RunFolder(at(lr=lr), "a")
        folder.claim()
        assert not folder.prepare() and not (folder.path / SELECTION).exists()
        folder.write(SELECTION, "{}")
        (folder.path / "metrics.jsonl").touch()
        (folder.path / "checkpoints" / "step_00000000.part").mkdir(parents=True, exist_ok=True)
        folder.release()
        assert f"lr: {lr}" in (folder.path / RECORD).read_text()
    assert not overwritten(at(lr=0.3, resume=True)), "and resume=true starts afresh"


def test_settings_that_are_damaged_are_said_to_be(at):
    path = begin(at())
    for content in ("", "a: [", "7", "model:\n  name: adder\n"):
        (path / RECORD).write_text(content)
        error = refused(at(resume=True))
        assert "is damaged" in error.remedy and str(path / RECORD) in error.remedy
    (path / RECORD).unlink()
    assert overwritten(at(resume=True)), "the remedy helps"


# -- a full disk -----------------------------------------------------------------------------------


def test_a_full_disk_refuses_a_new_run_in_a_sentence(at):
    with full_disk(10), pytest.raises(ConfigError, match="make room") as error:
        RunFolder(at(), "a").claim()
    assert error.value.key == "runs_dir"
    with full_disk(1000):
        folder = RunFolder(at(), "b")
        folder.claim()
        with pytest.raises(ConfigError, match="make room"):
            folder.prepare()
        folder.release()
    assert begin(at(), "a").exists() and begin(at(), "b").exists()


def test_a_round_that_is_gone_is_one_message(tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "on_main", lambda work: work())
    config = compose_config([])
    records = RoundRecords(config, tmp_path, lambda index: RoundFolder(tmp_path / f"rounds/{index:03d}"))
    with pytest.raises(DataError, match=r"rounds/000/round\.json is not as it was written \(it is gone\)"):
        records.close(0)
