"""What looks at a run and what ends it early: observers, named evaluation sets, patience. They change no
number, their stop holds when it is resumed, and what fails costs nothing but itself."""

from __future__ import annotations

import json
import random
import shutil
from functools import partialmethod
from pathlib import Path

import numpy as np
import pytest
import torch

from config.cli import compose
from jobs.observers import Observers
from models.distributed import start
from reports.report import final_table
from tests.integration.online import lines
from tests.tiny import ROOT
from train import train

SMALL = ("loss=dpo", "humanline=true", "lr=1e-3", "model.batch_size=4", "n_examples=32", "eval_every=8")
SMALL += ("n_eval_examples=8", "n_eval_prompts=8", "wandb.enabled=false", "diagnostics=false", "report=false")
EARLY = ("humanline=false", "model.batch_size=8", "n_examples=240", "eval_every=16", "n_eval_prompts=16")
EARLY += ("keep_best=eval_accuracy_sampled", "patience=2")
HERE = "tests.integration.test_observers"
PAIRS = (ROOT / "assets" / "adder" / "eval_pairs.jsonl").read_text().splitlines()
SETS = {
    "same": PAIRS,
    "other": [*PAIRS[100:116], "{"],
    "asked": [json.dumps({"prompt": f"{i}0+11=", "reference": f"{i}1"}) for i in range(1, 9)],
    "scored": PAIRS[:16],
}
"""The run's own held-out rows under another name, others, prompts alone, and rows that no verifier checks."""


def config_of(folder: Path, *more: str):
    words = (*SMALL, f"runs_dir={folder}", f"cache_dir={folder}/cache", "exp_name=x")
    given = {word.partition("=")[0] for word in more}
    return compose(*(word for word in words if word.partition("=")[0] not in given), *more)[0]


def numbers(run: Path) -> list[dict]:
    """The lines of metrics but for times, and for what further sets add."""
    further = tuple(f"eval_{name}_" for name in SETS)
    return [
        {k: v for k, v in r.items() if k != "seconds" and "per_second" not in k and not k.startswith(further)}
        for r in lines(run)
    ]


def weights(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


class Recorder:
    """Keeps what it is told, spoils it, and draws random numbers."""

    told: list[tuple]

    def __init__(self, seed: int = 0) -> None:
        self.seed, self.told = seed, []

    def _keep(self, *what):
        self.told.append(json.loads(json.dumps(what, default=str)))
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(self.seed)
        for part in what:
            if isinstance(part, dict):
                part.clear()

    def on_start(self, run_dir, config, step):
        assert run_dir.is_dir()
        self._keep("start", config, step)

    on_step = partialmethod(_keep, "step")
    on_evaluation = partialmethod(_keep, "evaluation")
    on_end = partialmethod(_keep, "end")


class Stops:
    """Asks for a stop at an evaluation."""

    def __init__(self, *, at: int) -> None:
        self.at = at

    def on_evaluation(self, step, values):
        return step == self.at


class Fails:
    def on_step(self, record):
        print(1 / (record["step"] < 1))

    def on_evaluation(self, step, values):
        return False


class Returns:
    def on_evaluation(self, step, values):
        return values["eval_loss"]


class Misspelt:
    def on_evaluate(self, step, values): ...


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With a run that nobody observes."""
    folder = tmp_path_factory.mktemp("runs")
    train(config_of(folder), "plain")
    return folder


def test_what_is_told_is_what_the_run_keeps_and_nothing_changes(folder, capsys):
    """Nor by further sets, nor by one that raises, which is told of with its line."""
    observer = Recorder(3)
    words = [f"callbacks.other._target_={HERE}.Recorder", "callbacks.other.seed=5", "keep_checkpoints=1"]
    words += [f"callbacks.bad._target_={HERE}.Fails", "keep_best=eval_other_loss", "report=true"]
    for name, rows in SETS.items():
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
        words.append(f"evaluations.{name}.path={folder}/{name}.jsonl")
    config = config_of(folder, *words, "evaluations.scored.verifier=null")
    summary = train(config, "observed", observers=[observer, Returns()])
    run, after = folder / "observed", summary["after"]
    assert weights(run) == weights(folder / "plain") and numbers(run) == numbers(folder / "plain")
    told = lambda kind: [rest for first, *rest in observer.told if first == kind]  # noqa: E731
    assert [record for (record,) in told("step")] == lines(run)
    evaluated = [r for r in lines(run) if "eval_loss" in r]
    kept = [[r["step"], {k: v for k, v in r.items() if "eval_" in k}] for r in evaluated]
    assert told("evaluation") == [*kept, [8, after]] and len(kept) == 4
    (kind, settings, step), *_, (last, ended) = observer.told
    assert (kind, step, settings["lr"], last, ended) == ("start", 0, 1e-3, "end", summary)
    err = capsys.readouterr().err.splitlines()
    (said,) = [line for line in err if "callbacks.bad" in line]
    assert sum("observers[1]: on_evaluation failed, TypeError: it returned 0.69" in line for line in err) == 1
    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "1 / (" in text)
    assert f"on_step failed, {__file__}, line {line}: ZeroDivisionError: division by zero" in said
    # Further sets: beside the run's own numbers; what a set cannot give is left out
    answers = {"accuracy_sampled", "accuracy_greedy", "length_sampled"}
    for line in (*evaluated, after):
        of_rows = ("loss", "reward_chosen", "reward_margin", "reward_accuracy", "drift")
        assert [line[f"eval_same_{key}"] for key in of_rows] == [line[f"eval_{key}"] for key in of_rows]
        assert line["eval_other_loss"] != line["eval_loss"] or line["step"] == 0
        assert all(line[f"eval_{name}_{key}"] is not None for name in ("same", "other") for key in answers)
        assert "eval_other_kl_initial" not in line and "eval_scored_accuracy_sampled" not in line
    assert {key for key in after if "_asked_" in key} == {f"eval_asked_{key}" for key in answers}
    assert "eval_scored_loss" in after
    assert "other: evaluation margin" in (run / "report.html").read_text()
    assert "other: evaluation loss" in (run / "model" / "README.md").read_text()


def ends_there_again(run: Path, summary: dict, *words: str) -> None:
    """Without what the end wrote, and resumed."""
    before = weights(run)
    (run / "summary.json").unlink()
    shutil.rmtree(run / "model")
    again = train(config_of(run.parent, *words, "resume=true"), run.name)
    assert (again["steps"], again["after"]) == (summary["steps"], summary["after"])
    assert weights(run) == before


def test_a_stop_ends_the_run_well_and_there_again_when_it_is_resumed(folder, capsys):
    words = (f"callbacks.mine._target_={HERE}.Stops", "callbacks.mine.at=4")
    run, summary = folder / "stopped", train(config_of(folder, *words), "stopped")
    assert summary["stopped_early"] and summary["steps"] == 4
    assert summary["stopped_why"].startswith("callbacks.mine asked for it")
    assert "stopped before step 4: callbacks.mine asked for it" in capsys.readouterr().out
    assert numbers(run) == numbers(folder / "plain")[:4]
    ends_there_again(run, summary, *words)
    without = train(config_of(folder, "resume=true"), "stopped")
    assert without["steps"] == 8 and not without["stopped_early"]
    assert weights(run) == weights(folder / "plain")


def test_patience_ends_a_run_and_there_again_when_it_is_resumed(folder):
    summary, run = train(config_of(folder, *EARLY), "patient"), folder / "patient"
    seen = [line[k] for line in lines(run) if (k := "eval_accuracy_sampled") in line]
    assert summary["stopped_early"] and summary["steps"] < 30
    assert f"stopped early: {summary['stopped_why']}" in final_table(summary)
    assert "were no better than the best before them" in summary["stopped_why"]
    assert len(seen) - 1 - seen.index(max(seen)) + 1 == 2, "the last one stands in the summary"
    shutil.rmtree(run / "checkpoints" / f"step_{summary['steps']:08d}")
    ends_there_again(run, summary, *EARLY)


def random_states() -> tuple[object, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


def test_rounds_are_told_and_may_be_the_last():
    class Rounds:
        def on_round(self, index, values):
            drawn = float(torch.rand(1)) + random.random() + np.random.rand()
            return f"reward {values['reward']}, drawn {drawn}" if index == 1 else None

    observers, before = Observers.of({}, [Rounds()], start()), random_states()
    observers.tell("on_round", 0, {"reward": 0.5}, stop_at=3)
    observers.tell("on_round", 1, {"reward": 0.25}, stop_at=7)
    assert random_states() == before, "what an observer draws is not missing from the run"
    assert observers.stops(3) is None is observers.stops(6)
    assert "observers[0] asked for it: reward 0.25" in str(observers.stops(7))
    for others, stop in ((Observers.of({}, [Recorder()], start()), observers.stops(7)), (Observers(), None)):
        others.restore(json.loads(json.dumps(observers.state())))
        assert others.stops(7) == stop
