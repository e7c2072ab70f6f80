"""What a run keeps, on a disk that is full for a while and among files that something else has changed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common.errors import Requeue, StoppedError
from export import export_run
from jobs.job import Job
from jobs.watch import RunWatch
from models.checkpoint_reading import CheckpointError
from reports.metrics import FILES
from tests import programs
from tests.full_disk import set_limit
from tests.tiny import make_config
from train import train

SETTINGS = (
    "n_examples=80",
    "model.batch_size=4",
    "n_eval_examples=8",
    "n_eval_prompts=8",
    "wandb.enabled=false",
    "lr=1e-3",
    "data.verifier=null",
    "retention.kl=false",
    "report=false",
    "loss=dpo",
    "humanline=true",
    "sync_freq=3",
    "save_every=20",  # checkpoints before steps 0, 5, 10 …; a line of diagnostics each step
)
STEPS = 20


class KilledError(Exception):
    """The process ended here."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With the run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("runs")
    train(settings(folder), "whole")
    return folder


@pytest.fixture(autouse=True)
def _room_again():
    yield
    set_limit(None)


def settings(folder: Path, *more: str):
    return make_config(f"runs_dir={folder}", f"cache_dir={folder / 'cache'}", *SETTINGS, *more)


def before_steps(monkeypatch, what) -> None:
    """Have ``what`` called with each step's number before the step."""
    real = RunWatch.before_step

    def before_step(self, segment):
        what(self.trainer.progress.step)
        real(self, segment)

    monkeypatch.setattr(RunWatch, "before_step", before_step)


def killed_at(folder: Path, name: str, step: int, *more: str) -> None:
    def kill(at: int) -> None:
        if at == step:
            raise KilledError

    with pytest.MonkeyPatch.context() as patch:
        before_steps(patch, kill)
        with pytest.raises(KilledError):
            train(settings(folder, *more), name)


def asked_at(folder: Path, name: str, step: int, *more: str) -> None:
    def ask(at: int) -> None:
        if at == step:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        before_steps(patch, ask)
        with pytest.raises(Requeue):
            train(settings(folder, *more), name)


def lines(run: Path, name: str = "metrics") -> list[dict]:
    records = [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if k != "seconds" and "tokens_per_second" not in k} for r in records]


def check(folder: Path, name: str) -> None:
    """The run ended like the undisturbed one: weights to the bit, each line once."""
    whole, other = folder / "whole", folder / name
    one, two = (load_file(run / "model" / "model.safetensors") for run in (whole, other))
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert lines(other) == lines(whole) and [r["step"] for r in lines(other)] == list(range(STEPS))
    assert lines(other, "diagnostics") == lines(whole, "diagnostics")
    assert not list((other / "checkpoints").glob("*.part"))


def stopped_before_its_last_steps(folder: Path, name: str) -> Path:
    """A copy of the undisturbed run without its last checkpoint and what it left at the end."""
    run = folder / name
    shutil.copytree(folder / "whole", run)
    shutil.rmtree(run / "checkpoints" / f"step_{STEPS:08d}")
    shutil.rmtree(run / "model")
    (run / "summary.json").unlink()
    return run


def tampered(run: Path, name: str, content: bytes) -> None:
    """Another file in each checkpoint, with a manifest that fits."""
    for checkpoint in (run / "checkpoints").iterdir():
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        (checkpoint / name).write_bytes(content)
        manifest[name] = [len(content), zlib.crc32(content)]
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))


# -- room ------------------------------------------------------------------------------------------


def test_a_disk_that_is_full_for_a_while_costs_checkpoints_alone(folder, monkeypatch, capsys):
    """From step 3 no file may grow beyond 20,000 bytes (no checkpoint fits), from 7 beyond 3,000 (no line
    does)."""
    limits = {3: 20_000, 7: 3_000, 13: None}

    def limit(step: int) -> None:
        if step in limits:
            set_limit(limits[step])

    with monkeypatch.context() as patch:
        before_steps(patch, limit)
        train(settings(folder, "keep_checkpoints=9"), "full")
    check(folder, "full")
    kept = [int(path.name[5:]) for path in sorted((folder / "full" / "checkpoints").iterdir())]
    assert kept == [0, 15, 20]
    out = capsys.readouterr().out
    assert out.count("the run goes on, the checkpoints before it stay") == 2
    assert "File too large" in out and "metrics.jsonl: [Errno 27]" in out and "Traceback" not in out


def test_whatever_finds_no_room_the_same_command_goes_on_when_there_is_some(folder, monkeypatch):
    """Before it trains; killed while it trains on; at its end."""
    finish = Job.finish

    def limit(step: int) -> None:
        if step == 7:
            set_limit(3_000)
        if step == 13:
            raise KilledError

    def finish_without_room(self, *given):
        set_limit(20_000)
        return finish(self, *given)

    with monkeypatch.context() as patch:
        before_steps(patch, lambda step: set_limit(20_000))
        with pytest.raises(StoppedError, match=r"step_00000000 could not be written"):
            train(settings(folder), "short")
    set_limit(None)
    with monkeypatch.context() as patch:
        before_steps(patch, limit)
        with pytest.raises(KilledError):
            train(settings(folder, "resume=true"), "short")
    set_limit(None)
    with monkeypatch.context() as patch:
        patch.setattr(Job, "finish", finish_without_room)
        with pytest.raises(StoppedError, match=r"what it leaves could not be written .* resume=true"):
            train(settings(folder, "resume=true"), "short")
    set_limit(None)
    left = {path.name for path in (folder / "short").iterdir()}
    assert not left & {"model", ".model.part", "summary.json"}
    train(settings(folder, "resume=true"), "short")
    check(folder, "short")


# -- going on --------------------------------------------------------------------------------------


def test_each_line_stands_once_after_being_asked_to_stop_resumed_and_killed(folder, capsys):
    """The checkpoint before step 12 is older than the line of diagnostics that the run writes there when it
    goes on."""
    asked_at(folder, "often", 12)
    killed_at(folder, "often", 14, "resume=true")
    assert lines(folder / "often", "diagnostics")[-1]["step"] == 12, "it will be written again"
    train(settings(folder, "resume=true"), "often")
    check(folder, "often")
    assert "is not as the run left it" not in capsys.readouterr().out


def test_files_that_something_else_changed_are_put_back_and_it_is_said(folder, capsys):
    run = stopped_before_its_last_steps(folder, "changed")
    (run / "metrics.jsonl").write_bytes(b"")
    path = run / "diagnostics.jsonl"
    path.write_bytes(b"\0" * path.stat().st_size)
    answers = (run / "answers.jsonl").read_bytes()
    (run / "answers.jsonl").write_bytes(answers.replace(b'"answer": "', b'"answer": "0', 1))
    train(settings(folder, "resume=true"), "changed")
    check(folder, "changed")
    out = capsys.readouterr().out
    assert all(f"{run / file} is not as the run left it" in out for file in (*FILES, "answers.jsonl"))
    assert (run / "answers.jsonl").read_bytes() == answers
    assert [(run / f"{file}.damaged").exists() for file in FILES] == [False, True]


# -- what others made ------------------------------------------------------------------------------


class Calls:
    """Makes ``made`` when it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self):
        return os.mkdir, (str(self.made),)


def test_a_foreign_checkpoint_runs_nothing(folder, tmp_path):
    """With a manifest that fits: only what is in the table gives it away."""
    run, made = stopped_before_its_last_steps(folder, "foreign"), tmp_path / "made"
    tampered(run, ".metadata", pickle.dumps(Calls(made)))
    with pytest.raises(CheckpointError, match=r"asks for posix\.mkdir"):
        export_run(run, None, tmp_path / "exported")
    with pytest.raises(CheckpointError, match=r"asks for posix\.mkdir"):
        train(settings(folder, "resume=true"), "foreign")
    done = programs.run("export.py", run, "--to", tmp_path / "exported")
    assert done.returncode == 1 and "Traceback" not in done.stderr and "nothing of it was run" in done.stderr
    assert not made.exists() and not (tmp_path / "exported").exists()
