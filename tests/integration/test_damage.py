"""Files of a run that something else has changed, or another run has written: passed over or put back, and
said, or refused by name; never taken. It ends as the undisturbed run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError, DataError
from config.load import LOCK
from export import export_run
from models.checkpoint import Checkpoints
from reports.metrics import FILES
from tests.integration.online import assert_same, cut_off, lines, rounds, run_online
from tests.integration.test_kills import ENDS, ROUNDS, SMALL, same
from tests.tiny import ROOT, make_config
from tests.tiny_files import cut, everything, flipped
from train import train

STEPS = 12
OFFLINE = (*SMALL[:-2], "n_eval_prompts=4", "loss=dpo", "humanline=true", "sync_freq=3", "save_every=12")
OFFLINE += ("keep_checkpoints=3",)
ONLINE = (*ROUNDS, *ENDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With two runs that nothing disturbs."""
    folder = tmp_path_factory.mktemp("runs")
    go(folder, "whole", *OFFLINE)
    go(folder, "rounds", *ONLINE)
    return folder


def go(folder: Path, name: str, *words: str) -> dict[str, Any]:
    return train(make_config(*words, f"runs_dir={folder}", f"cache_dir={folder}/cache"), name)


def stopped(folder: Path, name: str) -> Path:
    """A copy of the undisturbed run without its last checkpoint and what it left at the end."""
    run = folder / name
    shutil.copytree(folder / "whole", run)
    shutil.rmtree(run / "checkpoints" / f"step_{STEPS:08d}")
    shutil.rmtree(run / "model")
    (run / "summary.json").unlink()
    return run


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step_????????"))


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "damage"), [("*.distcp", flipped), ("state.json", cut)])
def test_a_damaged_checkpoint_is_passed_over_and_spoils_no_later_one(
    folder: Path, capfd: pytest.CaptureFixture[str], name: str, damage: Callable[[Path], None]
) -> None:
    run = stopped(folder, f"{name.strip('*.')}-{damage.__name__}")
    hurt = newest(run)
    older = max(set((run / "checkpoints").iterdir()) - {hurt})
    left = run / "checkpoints" / "step_00000010.part"
    shutil.copytree(hurt, left)  # as a save that was killed leaves it
    own = run / "checkpoints" / "step_00000001_of_mine"
    shutil.copytree(older, own)
    damage(next(hurt.glob(name)))
    go(folder, run.name, *OFFLINE, "resume=true")
    out = capfd.readouterr().out
    assert f"{hurt}" in out and f"resumed before step {int(older.name[5:])}" in out
    assert "could not be written" not in out and own.is_dir() and not left.exists()
    same(run, folder / "whole")


def test_files_that_something_else_changed_are_put_back_and_it_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stopped(folder, "changed")
    (run / "metrics.jsonl").write_bytes(b"")
    path = run / "diagnostics.jsonl"
    path.write_bytes(b"\0" * path.stat().st_size)
    answers = (run / "answers.jsonl").read_bytes()
    (run / "answers.jsonl").write_bytes(answers.replace(b'"answer": "', b'"answer": "0', 1))
    go(folder, "changed", *OFFLINE, "resume=true")
    same(run, folder / "whole")
    out = capsys.readouterr().out
    assert all(f"{run / file} is not as the run left it" in out for file in (*FILES, "answers.jsonl"))
    assert [(run / f"{file}.damaged").exists() for file in FILES] == [False, True]


# -- rounds ----------------------------------------------------------------------------------------


def test_files_of_rounds_that_are_gone_or_come_from_other_weights_are_made_again(folder: Path) -> None:
    whole = folder / "rounds"
    with cut_off(min(line["step"] for line in lines(whole) if line["round"] == 2) + 1):
        go(folder, "gone", *ONLINE)
    for stage in ("samples", "groups"):
        rounds(folder / "gone")[1].file(stage).unlink()
    other = rounds(folder / "gone")[2]
    stages, made = other.record["stages"], other.file("samples").stat().st_mtime_ns
    assert stages["samples"]["inputs"]["weights"] == other.record["weights"]
    stages["samples"]["inputs"]["weights"] = "others"
    other.note({"stages": stages})
    go(folder, "gone", *ONLINE, "resume=true")
    same(folder / "gone", whole)
    assert other.file("samples").stat().st_mtime_ns > made


# -- two runs' folders, merged ---------------------------------------------------------------------

KEPT = ("online=true", "loss=dpo", "humanline=true", "lr=1e-3", "model.batch_size=4")
KEPT += ("rounds.compress=true", "rounds.keep_weights=true", "save_every=4", "keep_checkpoints=3")
OF_ANOTHER = r"^resume=True: \S+/step_0000000{0} is of step {1} of run \w+, and \S+/run.json is of run \w+:"
NOT_THE_ROUND = r"rounds/00{0}/round\.json is not as it was written \(it is of round {1} of run \w+\)"
ALL_BUT_SETTINGS = "checkpoints rounds run.json metrics.jsonl"
MERGED = {
    "checkpoints/step_00000005": OF_ANOTHER.format(5, 5),
    "checkpoints": OF_ANOTHER.format(5, 5),
    "run.json": OF_ANOTHER.format(5, 5),
    ALL_BUT_SETTINGS: r"^seed=1: .* of a run with another seed; .*'resume_with_other=\[seed\]'",
    "rounds": NOT_THE_ROUND.format(0, 0),
    "rounds/000/round.json": NOT_THE_ROUND.format(0, 0),
    "rounds/000/groups.jsonl.gz": r"rounds/000/groups\.jsonl\.gz is not as it was written",
    "rounds/001/scores.jsonl.gz": r"rounds/001/scores\.jsonl\.gz is not as it was written",
}
"""What is put in from another run -> the refusal."""
SWAPPED = {
    ("rounds/000", "rounds/001"): NOT_THE_ROUND.format(0, 1),
    ("checkpoints/step_00000003", "checkpoints/step_00000004"): OF_ANOTHER.format(4, 3),
    ("rounds", "aside"): r"rounds/000/round\.json is not as it was written \(it is gone",
}


def test_what_is_another_runs_is_refused_by_its_name(tmp_path: Path) -> None:
    kept = run_online(tmp_path, "kept", *KEPT)
    run, other, before = tmp_path / "r", tmp_path / "other", tmp_path / "before"
    for folder, seed in ((run, 1), (other, 2)):
        with cut_off(at=5):
            run_online(tmp_path, folder.name, *KEPT, f"seed={seed}")
    shutil.copytree(run, before)

    def refused(message: str) -> None:
        batches: list[Any] = []
        with pytest.raises((ConfigError, DataError), match=message), cut_off(None, batches):
            run_online(tmp_path, "r", *KEPT, "resume=true")
        assert not batches, "it is refused before it trains"
        shutil.rmtree(run)
        shutil.copytree(before, run)

    for names, message in MERGED.items():
        for path in (run / name for name in names.split()):
            theirs = other / path.relative_to(run)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            shutil.copytree(theirs, path) if theirs.is_dir() else shutil.copy(theirs, path)
        refused(message)
    for (first, second), message in SWAPPED.items():
        (run / first).rename(run / "between")
        if (run / second).exists():
            (run / second).rename(run / first)
        (run / "between").rename(run / second)
        refused(message)
    rounds(run)[0].note({"sampled_step": 1})  # with a checksum that fits
    refused(r"rounds/000/round\.json is not as it was written \(it is gone, or not the checkpoint's")
    (run / "run.json").write_text("{")  # its checkpoints say which run it is
    run_online(tmp_path, "r", *KEPT, "resume=true")
    assert (begun := json.loads((before / "run.json").read_text())["run"])
    assert json.loads((run / "run.json").read_text())["run"] == begun
    assert_same(run, kept)
    for path in (*kept.glob("rounds/*/weights/model.safetensors"), *kept.glob("rounds/*/*.gz")):
        assert (run / path.relative_to(kept)).read_bytes() == path.read_bytes()


# -- what is there ---------------------------------------------------------------------------------


def test_a_refused_start_touches_nothing_and_does_not_stand_in_the_way(folder: Path, tmp_path: Path) -> None:
    few = (*SMALL, "n_examples=8")
    go(tmp_path, "there", *few)
    before = everything(tmp_path / "there")
    weightless = tmp_path / "weightless"
    shutil.copytree(ROOT / "assets/adder/model", weightless, ignore=shutil.ignore_patterns("*.safetensors"))
    other, empty = "optimizer=torch.optim.RMSprop", f"model.name_or_path={weightless}"
    for name, words, message in (
        ("there", (), "overwrite=true"),
        ("there", ("resume=true", "lr=2e-3"), r"lr=0.002: was 0.001 when"),
        ("there", ("resume=true", other), f"{other}: was AdamW when"),
        ("there", ("overwrite=true", empty), "name_or_path"),
        ("new", ("overwrite=true", empty), "name_or_path"),
    ):
        with pytest.raises(ConfigError, match=message):
            go(tmp_path, name, *few, *words)
        assert everything(tmp_path / "there") | {LOCK: None} == before | {LOCK: None}
        assert not (tmp_path / "new").exists()
    go(tmp_path, "new", *few, "resume=true")  # nothing to resume: it starts
    go(tmp_path, "there", *few, "overwrite=true", "lr=2e-3")
    assert "lr: 0.002" in (tmp_path / "there" / "config.yaml").read_text()


def test_the_last_and_best_checkpoints_stay_and_any_is_exported_beside_what_is_there(tmp_path: Path) -> None:
    go(tmp_path, "run", *SMALL, "eval_every=8", "keep_best=eval_loss", "keep_checkpoints=2", "lr=0.02")
    run = tmp_path / "run"
    kept = [int(path.name[5:]) for path in Checkpoints(run / "checkpoints", None, 2).all()]
    losses = {line["step"]: line["eval_loss"] for line in lines(run) if "eval_loss" in line}
    best = min(losses, key=losses.__getitem__)
    assert sorted({best, 10, 12}) == kept
    exported = export_run(run, best, tmp_path / "exported")
    assert f"| Checkpoint | before step {best} |" in (exported / "README.md").read_text()
    last = export_run(run, None, tmp_path / "last") / "model.safetensors"
    assert last.read_bytes() == (run / "model" / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="there are"):
        export_run(run, 3, None)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("mine")
    before = everything(tmp_path)
    for there in ("thesis", "exported", "run", "thesis/thesis.txt", "."):
        with pytest.raises(ConfigError, match="is there already"):
            export_run(run, None, tmp_path / there)
    assert everything(tmp_path) == before
