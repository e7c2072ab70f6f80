"""Plans and local runs, with a stand-in for train.py that behaves as its exit codes say."""

from __future__ import annotations

import io
import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from config.cli import compose_config
from config.load import LOCK
from launch import local, sweep
from launch.grid import Run
from launch.local import STOPPED, Pool
from launch.slurm import Job
from launch.state import CHANGED, FAILED, NEW, PARTIAL, Composer, State, Statuses, inspect
from launch.sweep import dry_run, hours_at, hours_of, tokens_in
from reports.outcome import FINISHED
from tests.programs import until
from tests.unit.common.test_lock import holder  # noqa: F401
from tests.unit.launch.test_results import finish

STAND_IN = """
import os, pathlib, signal, sys, time
folder, kind, rank = pathlib.Path(sys.argv[1]), sys.argv[2], int(os.environ.get("RANK", 0))
folder.mkdir(parents=True, exist_ok=True)
asked = []
signal.signal(signal.SIGTERM, lambda *a: asked.append(1))
keys = ("LOCAL_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MASTER_PORT")
starts = folder / f"rank-{rank}"
with starts.open("a") as f: print(*(os.environ.get(key) for key in keys), file=f)
first = len(starts.read_text().splitlines()) == 1
while kind == "slow" and not asked: time.sleep(0.05)
if kind == "slow":
    time.sleep(1 + rank)  # saves
    (folder / f"saved-{rank}").touch()
if kind == "slow" or kind == "requeue" and first: sys.exit(75)
if kind == "refused": sys.exit(2)
if kind == "crash" or kind == "flaky" and first:
    if rank + 1 < int(os.environ.get("WORLD_SIZE", 1)): time.sleep(60)  # hangs
    print("boom", flush=True)
    sys.exit(7)
(folder / "summary.json").write_text("{}")
"""


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "stand_in.py"
    program.write_text(STAND_IN)
    base = compose_config([f"runs_dir='{tmp_path}'"])
    starts = lambda run: [str(program), str(tmp_path / run.name), run.settings["kind"]]  # noqa: E731
    monkeypatch.setattr(local, "command", starts)

    def make(*kinds: str, slots: int = 2, gpus: tuple[str, ...] = ()) -> Pool:
        runs = [Run("s", f"{kind}{i}", 1, {"kind": kind}, None) for i, kind in enumerate(kinds)]
        return Pool([State(run, base, NEW) for run in runs], tmp_path / "logs", slots, gpus, retries=1)

    return make


def kinds_of(tasks) -> list[str]:
    statuses = Statuses(tasks[0].log.parent)
    return [statuses.of(task.state.run.name, task.state.folder).kind for task in tasks]


def test_each_exit_code_is_understood_and_stopping_starts_no_other(pool, tmp_path: Path) -> None:
    out = io.StringIO()
    tasks = pool("fine", "crash", "flaky", "refused", "requeue").run(out)
    starts = [len((task.state.folder / "rank-0").read_text().splitlines()) for task in tasks]
    assert [task.status for task in tasks] == [FINISHED, FAILED, FINISHED, FAILED, FINISHED]
    assert starts == [1, 2, 2, 1, 2]
    said = local.failures(tasks)
    assert all(part in said for part in ("boom", "crash1-s1: exit code 7", "refused3-s1: exit code 2"))
    assert "flaky" not in said and "finished" in out.getvalue() and "failed" in out.getvalue()
    assert kinds_of(tasks) == ["finished", "failed", "finished", "failed", "finished"]
    statuses = Statuses(tmp_path / "logs")
    found = statuses.of("crash1-s1", tasks[1].state.folder)
    assert (found.detail, found.log) == ("boom", tasks[1].log)
    made = pool("slow", "slow", "fine", slots=2)
    threading.Timer(1.5, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    begun = time.monotonic()
    tasks = made.run(io.StringIO())
    assert [task.status for task in tasks] == [STOPPED] * 3 and time.monotonic() - begun < 10
    assert [task.code for task in tasks] == [75, 75, None]
    assert kinds_of(tasks) == ["interrupted", "interrupted", "not started"]


def test_the_ranks_of_a_run_end_with_its_code_and_finish_saving(pool, monkeypatch) -> None:
    monkeypatch.setattr(local, "GRACE", 2.0)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS")
    tasks = pool("fine", "refused", "crash", slots=2, gpus=("4", "5", "6", "7")).run(io.StringIO())
    ends = [(task.status, task.code, task.failures) for task in tasks]
    assert ends == [(FINISHED, 0, 0), (FAILED, 2, 1), (FAILED, 7, 2)]
    ranks = [(tasks[0].state.folder / f"rank-{rank}").read_text().rsplit(" ", 1) for rank in range(2)]
    assert [rank[0] for rank in ranks] == ["0 2 4,5 2", "1 2 4,5 2"] and ranks[0][1] == ranks[1][1]
    made = pool("slow", slots=1, gpus=("4", "5"))
    folder = made.tasks[0].state.folder

    def stop() -> None:
        until(lambda: len(list(folder.glob("rank-*"))) == 2)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop).start()
    [task] = made.run(io.StringIO())
    assert (task.status, task.code) == (STOPPED, 75)
    assert {path.name for path in folder.glob("saved-*")} == {"saved-0", "saved-1"}


def made(tmp_path: Path, **parts: object) -> str:
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump({"base": {"runs_dir": str(tmp_path / "runs")}, **parts}))
    return str(path)


def test_states_of_runs(tmp_path: Path) -> None:
    settings = {"runs_dir": str(tmp_path / "runs"), "loss": "dpo"}
    run = {cell: Run("s", cell, 1, settings, 1.0) for cell in ("new", "partial", "finished", "changed")}
    finish(tmp_path / "runs", "partial-s1", None, "loss=dpo", "wandb.tags=[x]")
    finish(tmp_path / "runs", "finished-s1", 0.5, "loss=dpo", "n_examples=320")
    finish(tmp_path / "runs", "changed-s1", 0.5, "loss=dpo", "lr=1e-3")
    often = {"n_examples": 320, "eval_every": 4, "n_eval_prompts": "all", "patience": False}
    run |= {"often": replace(run["finished"], settings=settings | often)}
    run |= {f"{n}": replace(run["finished"], settings=settings | {"n_examples": n}) for n in (160, 640)}
    run["finished"] = replace(run["finished"], settings=settings | {"n_examples": 320})
    composer = Composer()
    states = {cell: inspect(run[cell], composer) for cell in run}
    kinds = [NEW, PARTIAL, FINISHED, CHANGED, FINISHED, CHANGED, CHANGED]
    assert [state.kind for state in states.values()] == kinds, "a run may be measured more often"
    assert states["partial"].detail == "step 3", "a half-written line is no line"
    assert states["changed"].detail == "lr: 0.001 there, 0.0001 here"
    assert states["640"].detail == "n_examples: 320 there, 640 here"
    second = State(Run("s", "finished", 2, settings, 1.0), states["new"].config, NEW)
    hours = hours_of([*list(states.values())[:4], second])
    assert (hours["finished-s2"], hours["new-s1"]) == (60 / 3600, 1.0), "measured if a seed is"


def test_a_plan_names_every_command_and_acts_on_nothing(tmp_path, capsys) -> None:
    path = made(tmp_path, grid={"loss": ["dpo", "kto"]}, hours=3)
    assert sweep.main([path, "--set", "gpus_per_node=4", "lr=1e-4"]) == 0
    said = capsys.readouterr().out
    assert "s-dpo-s1" in said and said.count("    torchrun --nproc-per-node 4 train.py ") == 2
    assert "lr=0.0001 loss=kto seed=1 exp_name=s-kto-s1 " in said
    assert "6.0 hours to go, 24.0 GPU hours" in said and not (tmp_path / "runs").exists()


def test_changed_settings_are_refused_before_anything_starts(tmp_path, capsys) -> None:
    file = made(tmp_path)
    finish(tmp_path / "runs", "s-s1", 0.5, "lr=1e-3")
    assert sweep.main([file]) == 0, "looking is allowed"
    assert sweep.main([file, "--local", "1"]) == 2
    assert "lr" in capsys.readouterr().err
    assert sweep.main([file, "--script", "--set", "gpus_per_node=0", "--name", "s-2"]) == 0
    assert "exp_name=s-2-s1" in capsys.readouterr().out, "another name makes other runs of them"
    shutil.rmtree(tmp_path / "runs")
    finish(tmp_path / "runs", "s-s1", 0.5)
    assert sweep.main([file, "--local", "1", "--logs", str(tmp_path)]) == 0
    assert "nothing to do" in capsys.readouterr().out, "a finished sweep"


REFUSED = {
    "--gpus 0": "--gpus=0: is a part of --local N",
    "--local 2 --gpus 0,1,2": "--gpus=0,1,2: cannot be shared out to 2",
    "--local 1 --set nodes=2": "is of a Slurm job",
    "learning_rate=1": "s-s1: learning_rate=1: is TRL's name",
    "model.batch_size=32 model.microbatches=2 --set nodes=4 --set gpus_per_node=8 --script": "-s1: "
    "model.batch_size=32: must be a multiple of ranks x model.microbatches = 32 x 2",
}


def test_what_nothing_would_read_or_cannot_run_is_refused_before_the_plan(tmp_path, capsys) -> None:
    for words, said in REFUSED.items():
        assert sweep.main([made(tmp_path), *words.split()]) == 2
        assert said in (told := capsys.readouterr()).err and not told.out, words
    fits = ["model.batch_size=32", "model.microbatches=2", "--set", "nodes=2", "--set", "gpus_per_node=8"]
    assert sweep.main([made(tmp_path), *fits, "--script"]) == 0


def test_a_key_of_the_grid_that_no_run_reads_is_refused(tmp_path, capsys):
    base, grid = {"runs_dir": str(tmp_path)}, {"model.peft.lora_r": [4, 8]}
    said = "model.peft.lora_r=['4', '8']: nothing would read it in any run: it needs model.use_peft=true"
    assert sweep.main([made(tmp_path, base=base, grid=grid)]) == 2
    assert said in (told := capsys.readouterr()).err and not told.out
    assert sweep.main([made(tmp_path, base=base, grid=grid | {"model.use_peft": [False, True]})]) == 0


def test_a_run_that_another_process_does_is_waited_for(pool, holder) -> None:  # noqa: F811
    made = pool("fine", "crash", slots=2)
    others = [holder(task.state.folder / LOCK) for task in made.tasks]

    def end() -> None:
        (made.tasks[0].state.folder / "summary.json").write_text("{}")
        for other in others:
            other.kill()

    threading.Timer(1, end).start()
    fine, crash = made.run(out := io.StringIO())
    assert (fine.status, fine.restarts, crash.status, crash.restarts) == (FINISHED, 0, FAILED, 1)
    assert f"by process {others[0].pid} on" in out.getvalue()
    assert f"waits for process {others[1].pid}" in crash.log.read_text()


def test_a_dry_run_counts_what_will_be_trained_on_and_the_memory_of_the_jobs_card(
    tmp_path, monkeypatch, capsys
) -> None:
    base = {"runs_dir": str(tmp_path), "loss": "kto", "n_examples": 640, "wandb.enabled": False}
    file = made(tmp_path, base=base, seeds=[1, 2], slurm={"gpus_per_node": 1})
    outputs: list[str] = []
    monkeypatch.setattr(sweep, "dry_run", lambda *of: outputs.append(dry_run(*of)) or outputs[-1])
    assert sweep.main([file, "--memory"]) == 2 and "slurm.card=None: is not known" in capsys.readouterr().err
    assert sweep.main([file, "--memory", "--set", "card=H100"]) == 0
    said = capsys.readouterr().out
    assert said.count("Memory of the fullest of 1 rank(s) on H100") == 1 and "fits: 1." in said
    tokens = tokens_in(outputs[0])
    assert tokens == pytest.approx(640 * (9 + 14), rel=0.05), "prompts have 9 tokens, completions 14"
    assert hours_at(7200, 0.5, Job(nodes=2, gpus_per_node=2)) == 1.0
    assert sweep.main([file, "--rate", str(tokens / 3600)]) == 0 and "1.00 h" in capsys.readouterr().out
