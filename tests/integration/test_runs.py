"""Runs as a whole, on the embedded task: what they leave, and that they go on after anything as if nothing
had been."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.errors import REQUEUE, ConfigError, Requeue, StoppedError
from config.load import LOCK
from export import export_run
from jobs.watch import RunWatch
from models.checkpoint import Checkpoints
from tests import programs
from tests.full_disk import FILLER, fill, mounted
from tests.tiny import ROOT, make_config
from tests.tiny_files import everything
from train import train
from trainers.basic import BasicTrainer

SMALL = (
    "n_examples=48",
    "model.batch_size=4",
    "n_eval_examples=8",
    "wandb.enabled=false",
    "lr=1e-3",
    "data.verifier=null",
    "diagnostics=false",
    "retention.kl=false",
)


class CrashError(Exception):
    """The process ended here."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache) -> Callable[..., Path]:
    return undisturbed_runs(tmp_path_factory.mktemp("whole"), cache)


def undisturbed_runs(folder: Path, cache: Path) -> Callable[..., Path]:
    """A function that returns the folder of a run with such settings that nothing disturbs, the same one for
    all who ask."""

    @functools.cache
    def run(*more: str) -> Path:
        name = "_".join(more).translate(str.maketrans("=.", "--"))
        train(settings(folder, cache, *more), name)
        return folder / name

    return run


@pytest.fixture
def small_disk(tmp_path):
    with mounted(tmp_path / "disk", "64m") as folder:
        yield folder


def settings(folder: Path, cache: Path, *more: str):
    return make_config(f"runs_dir={folder}", f"cache_dir={cache}", *SMALL, *more)


def crash_before(monkeypatch, step: int) -> None:
    """Leave the loop, without any farewell, before this step."""
    real = RunWatch.before_step

    def before_step(self, segment):
        if self.trainer.progress.step == step:
            raise CrashError
        real(self, segment)

    monkeypatch.setattr(RunWatch, "before_step", before_step)


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def timeless(records: list[dict]) -> list[dict]:
    return [{k: v for k, v in r.items() if k != "seconds" and "tokens_per_second" not in k} for r in records]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


EVERY = ("eval_every=16", "save_every=12")
"""Evaluations and checkpoints at different steps."""
VARIANTS = [
    ("dpo", "humanline=false"),
    ("dpo", "humanline=true", "sync_freq=3"),
    ("kto", "humanline=true", "sync_freq=4"),
    ("grpo", "humanline=true"),
    ("dpo", "humanline=true", "model.use_peft=true", "model.peft.lora_r=4"),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(v[:1] + v[1:]))
def test_k_steps_and_the_rest_are_n_steps(tmp_path, cache, monkeypatch, whole, variant):
    loss, *more = variant
    undisturbed = whole(f"loss={loss}", *EVERY, *more)
    with monkeypatch.context() as patch:
        crash_before(patch, 8)
        with pytest.raises(CrashError):
            train(settings(tmp_path, cache, f"loss={loss}", *EVERY, *more), "parts")
    train(settings(tmp_path, cache, f"loss={loss}", *EVERY, "resume=true", *more), "parts")
    one, parts = (weights(run) for run in (undisturbed, tmp_path / "parts"))
    assert all(torch.equal(one[name], parts[name]) for name in one)
    assert timeless(lines(tmp_path / "parts")) == timeless(lines(undisturbed))
    assert [r["step"] for r in lines(tmp_path / "parts")] == list(range(12))
    before, after = (
        json.loads((run / "summary.json").read_text()) for run in (undisturbed, tmp_path / "parts")
    )
    assert before["after"] == after["after"] and before["before"] == after["before"]


def test_an_evaluation_that_was_due_when_the_run_was_stopped_is_made_when_it_goes_on(
    tmp_path, cache, monkeypatch, whole
):
    undisturbed = whole("loss=dpo", *EVERY, "humanline=false")
    real = RunWatch.before_step

    def before_step(self, segment):
        if self.trainer.progress.step == 8:
            os.kill(os.getpid(), signal.SIGTERM)
        real(self, segment)

    with monkeypatch.context() as patch:
        patch.setattr(RunWatch, "before_step", before_step)
        with pytest.raises(Requeue):
            train(settings(tmp_path, cache, "eval_every=16"), "stopped")
    train(settings(tmp_path, cache, "eval_every=16", "resume=true"), "stopped")
    one, stopped = (timeless(lines(run)) for run in (undisturbed, tmp_path / "stopped"))
    assert one == stopped and [r["step"] for r in stopped if "eval_loss" in r] == [0, 4, 8]


def test_a_damaged_checkpoint_is_passed_over(tmp_path, cache, monkeypatch, capfd, whole):
    undisturbed = weights(whole("loss=dpo", *EVERY, "humanline=false"))
    with monkeypatch.context() as patch:
        crash_before(patch, 9)
        with pytest.raises(CrashError):
            train(settings(tmp_path, cache, "save_every=12"), "hurt")
    newest, older = sorted((tmp_path / "hurt" / "checkpoints").iterdir())[::-1][:2]
    shard = next(newest.glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 255
    shard.write_bytes(content)
    left = tmp_path / "hurt" / "checkpoints" / "step_00000010.part"
    shutil.copytree(newest, left)  # as a save that was killed leaves it
    with monkeypatch.context() as patch:
        crash_before(patch, int(older.name[5:]))
        with pytest.raises(CrashError):
            train(settings(tmp_path, cache, "resume=true", "save_every=12"), "hurt")
    assert not left.exists(), "what a killed save left goes at the start"
    train(settings(tmp_path, cache, "resume=true", "save_every=12"), "hurt")
    out = capfd.readouterr().out
    assert f"{newest} is damaged" in out and f"resumed before step {int(older.name[5:])}" in out
    hurt = weights(tmp_path / "hurt")
    assert all(torch.equal(undisturbed[name], hurt[name]) for name in undisturbed)


def test_a_checkpoint_without_its_state_spoils_no_later_one(tmp_path, cache, monkeypatch, capfd):
    with monkeypatch.context() as patch:
        crash_before(patch, 9)
        with pytest.raises(CrashError):
            train(settings(tmp_path, cache, "save_every=12", "keep_checkpoints=2"), "run")
    kept = sorted((tmp_path / "run" / "checkpoints").iterdir())
    (kept[-1] / "state.json").unlink()
    own = tmp_path / "run" / "checkpoints" / "step_00000001_of_mine"
    shutil.copytree(kept[0], own)
    train(settings(tmp_path, cache, "resume=true", "save_every=8", "keep_checkpoints=2"), "run")
    assert "could not be written" not in capfd.readouterr().out
    assert own.is_dir() and len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2 + 1


def test_a_run_that_is_there_is_not_touched_unless_told_to(tmp_path, cache):
    train(settings(tmp_path, cache, "n_examples=8"), "run")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}
    with pytest.raises(ConfigError, match="overwrite=true"):
        train(settings(tmp_path, cache, "n_examples=8"), "run")
    with pytest.raises(ConfigError, match=r"lr=0.002: was 0.001 when"):
        train(settings(tmp_path, cache, "n_examples=8", "resume=true", "lr=2e-3"), "run")
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}
    train(settings(tmp_path, cache, "n_examples=8", "resume=true"), "fresh")  # nothing to resume: starts
    assert (tmp_path / "fresh" / "summary.json").exists()


def test_a_refused_start_deletes_nothing_and_does_not_stand_in_the_way(tmp_path, cache):
    few = settings(tmp_path, cache, "n_examples=8", "overwrite=true")
    train(few, "there")
    before = everything(tmp_path / "there")
    weightless = tmp_path / "weightless"
    shutil.copytree(ROOT / "assets/adder/model", weightless, ignore=shutil.ignore_patterns("*.safetensors"))
    wrong = settings(tmp_path, cache, "n_examples=8", "overwrite=true", f"model.name_or_path={weightless}")
    for name in ("there", "new"):
        with pytest.raises(ConfigError, match="name_or_path"):
            train(wrong, name)
    assert not (tmp_path / "new").exists()
    now = everything(tmp_path / "there")
    assert {k: v for k, v in now.items() if k != LOCK} == {k: v for k, v in before.items() if k != LOCK}
    train(settings(tmp_path, cache, "n_examples=8"), "new")
    train(settings(tmp_path, cache, "n_examples=8", "overwrite=true", "lr=2e-3"), "there")
    assert "lr: 0.002" in (tmp_path / "there" / "config.yaml").read_text()


def test_a_disk_that_is_full_when_a_run_goes_on_costs_it_nothing(
    small_disk, cache, monkeypatch, capfd, whole
):
    undisturbed = weights(whole("loss=dpo", *EVERY, "humanline=false"))
    with monkeypatch.context() as patch:
        crash_before(patch, 8)
        with pytest.raises(CrashError):
            train(settings(small_disk, cache, "save_every=12"), "run")
    kept = everything(small_disk / "run" / "checkpoints")
    record = (small_disk / "run" / "config.yaml").read_bytes()
    going_on = settings(small_disk, cache, "save_every=8", "resume=true")
    fill(small_disk)
    with pytest.raises((OSError, StoppedError)):
        train(going_on, "run")
    assert (small_disk / "run" / "config.yaml").read_bytes() == record
    assert everything(small_disk / "run" / "checkpoints") == kept
    (small_disk / FILLER).unlink()
    capfd.readouterr()
    train(going_on, "run")
    assert "resumed before step 6" in capfd.readouterr().out
    other = weights(small_disk / "run")
    assert all(torch.equal(undisturbed[name], other[name]) for name in undisturbed)
    assert [r["step"] for r in lines(small_disk / "run")] == list(range(12))


def test_what_a_run_leaves_loads_in_transformers_and_chains(tmp_path, cache):
    summary = train(settings(tmp_path, cache, "loss=kto", "humanline=true", "eval_every=24"), "run")
    run = tmp_path / "run"
    model, tokenizer = (cls.from_pretrained(run / "model") for cls in (AutoModelForCausalLM, AutoTokenizer))
    assert model.dtype == torch.float32 and tokenizer.chat_template
    base = AutoModelForCausalLM.from_pretrained(ROOT / "assets/adder/model")
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), base.parameters(), strict=True))
    wanted = {
        "step",
        "examples",
        "tokens",
        "loss",
        "grad_norm",
        "lr",
        "reward_chosen",
        "reward_rejected",
        "reward_margin",
        "reward_accuracy",
        "kl",
        "drift",
        "reference_step",
        "clipped_low",
        "clipped_high",
        "tokens_per_second",
        "tokens_per_second_per_rank",
        "token_balance",
        "seconds",
    }
    assert all(wanted <= set(line) for line in lines(run))
    assert [bool("eval_loss" in line) for line in lines(run)] == [i in (0, 6) for i in range(12)]
    assert summary["before"]["eval_reward_margin"] == 0.0 and summary["before"]["eval_reward_accuracy"] == 0.5
    for name in (
        "config.yaml",
        "data_report.md",
        "report.html",
        "model/README.md",
        "model/generation_config.json",
    ):
        assert (run / name).stat().st_size > 0
    train(settings(tmp_path, cache, "loss=dpo", f"model.name_or_path={run}", "n_examples=4"), "next")


def test_with_syncing_drift_is_measured_on_some_batches_and_the_report_says_on_how_many(tmp_path, cache):
    every = ("loss=dpo", "humanline=true", "n_examples=64", "model.batch_size=8")
    train(settings(tmp_path, cache, *every, "drift_examples=16"), "some")
    train(settings(tmp_path, cache, *every, "drift_examples=null"), "all")
    some, whole = ([line["drift"] for line in lines(tmp_path / name)] for name in ("some", "all"))
    assert [value is not None for value in some] == [True, False, False, False] * 2
    assert all(value is not None for value in whole) and [some[i] for i in (0, 4)] == [
        whole[i] for i in (0, 4)
    ]
    counts = [
        json.loads((tmp_path / name / "data_report.json").read_text())["logprob"]["all"]["count"]
        for name in ("some", "all")
    ]
    assert counts == [32, 128], "two of eight batches of eight pairs"


def test_the_last_and_the_best_checkpoints_stay_and_any_is_exported(tmp_path, cache):
    train(
        settings(tmp_path, cache, "eval_every=8", "keep_best=eval_loss", "keep_checkpoints=2", "lr=0.02"),
        "run",
    )
    kept = [int(p.name[5:]) for p in Checkpoints(tmp_path / "run" / "checkpoints", None, 2).all()]
    losses = {r["step"]: r["eval_loss"] for r in lines(tmp_path / "run") if "eval_loss" in r}
    best = min(losses, key=losses.get)
    assert sorted({best, 10, 12}) == kept
    folder = export_run(tmp_path / "run", best, tmp_path / "exported")
    assert f"| Checkpoint | before step {best} |" in (folder / "README.md").read_text()
    assert AutoTokenizer.from_pretrained(folder).chat_template and AutoModelForCausalLM.from_pretrained(
        folder
    )
    final = load_file(tmp_path / "run" / "model" / "model.safetensors")
    last = load_file(export_run(tmp_path / "run", None, tmp_path / "last") / "model.safetensors")
    assert all(torch.equal(final[name], last[name]) for name in final)
    with pytest.raises(ConfigError, match="there are"):
        export_run(tmp_path / "run", 3, None)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("mine")
    before = everything(tmp_path)
    for there in ("thesis", "exported", "run", "thesis/thesis.txt", "."):
        with pytest.raises(ConfigError, match="is there already"):
            export_run(tmp_path / "run", None, tmp_path / there)
    assert everything(tmp_path) == before


def test_a_dry_run_writes_nothing(tmp_path, cache, capfd):
    described = train(settings(tmp_path / "runs", tmp_path / "cache", "dry_run=true"), "run")
    assert described["steps"] == 12 and not (tmp_path / "runs").exists() and not (tmp_path / "cache").exists()
    out = capfd.readouterr().out
    assert "12 steps of 4" in out and "GiB" in out and "2,560 rows read" in out


def test_gradients_that_are_not_finite_stop_the_run_after_n_and_leave_their_batches(
    tmp_path, cache, monkeypatch
):
    from common.errors import StoppedError

    real = BasicTrainer.compute_loss
    from trainers.paired import PairedPreferenceTrainer

    def poisoned(self, micro, scores, prepared):
        result = real_paired(self, micro, scores, prepared)
        if self.progress.step in (2, 4, 5, 6):
            return type(result)(result.total * float("nan"), result.metrics)
        return result

    real_paired = PairedPreferenceTrainer.compute_loss
    assert real is not real_paired
    monkeypatch.setattr(PairedPreferenceTrainer, "compute_loss", poisoned)
    with pytest.raises(StoppedError, match="3 updates in a row"):
        train(settings(tmp_path, cache, "max_skipped_steps=3"), "run")
    records = lines(tmp_path / "run")
    assert [r["step"] for r in records if r.get("skipped")] == [2, 4, 5, 6]
    assert all(r["loss"] == r["loss"] and r["loss"] is not None for r in records if r["step"] in (1, 3))
    left = sorted((tmp_path / "run" / "skipped").iterdir())
    assert len(left) == 4 and len(left[0].read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, REQUEUE), (signal.SIGKILL, -9)], ids=["SIGTERM", "SIGKILL"]
)
def test_a_killed_process_goes_on(tmp_path, cache, whole, number, code):
    """The real program, killed in mid-run, started again with the same command. While it runs, no other
    may."""
    method = ("loss=dpo", "humanline=true", "sync_freq=2")
    command = [
        "train.py",
        *method,
        "resume=true",
        "exp_name=run",
        "save_every=4",
        f"runs_dir={tmp_path}",
        f"cache_dir={cache}",
        *SMALL,
    ]
    process, metrics = programs.start(*command), tmp_path / "run" / "metrics.jsonl"
    programs.until(
        lambda: process.poll() is not None or (metrics.exists() and metrics.read_text().count("\n") >= 3)
    )
    assert process.poll() is None, process.said()
    process.send_signal(signal.SIGSTOP)  # it cannot end while another start tries the same run
    try:
        with pytest.raises(ConfigError, match=f"in use by process {process.pid} on "):
            train(settings(tmp_path, cache, *method, "resume=true"), "run")
    finally:
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
    assert process.wait() == code, process.said()
    done = programs.run(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed before step" in done.stdout
    undisturbed, killed = weights(whole(*method)), weights(tmp_path / "run")
    assert all(torch.allclose(undisturbed[name], killed[name], atol=1e-6) for name in undisturbed)
    assert [r["step"] for r in lines(tmp_path / "run")] == list(range(12))
