"""Observers of a run: what they are told, that they change no number, that their stop holds, and that one
that fails costs nothing but itself."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from config.cli import compose
from jobs.observers import Observers
from models.distributed import start
from tests.integration.test_evaluation_sets import numbers
from train import train

SMALL = ("loss=dpo", "humanline=true", "lr=1e-3", "model.batch_size=4", "n_examples=32", "eval_every=8")
SMALL += ("n_eval_examples=8", "data.verifier=null", "wandb.enabled=false", "diagnostics=false")
SMALL += ("retention.kl=false", "report=false")
HERE = "tests.integration.test_observers"


def config_of(folder: Path, *more: str):
    return compose(*SMALL, f"runs_dir={folder}", f"cache_dir={folder}/cache", "exp_name=x", *more)[0]


class Recorder:
    """Keeps what it is told, spoils it, and draws random numbers."""

    told: list[tuple]

    def __init__(self, seed: int = 0) -> None:
        self.seed, self.told = seed, []

    def _keep(self, *what):
        self.told.append(json.loads(json.dumps(what, default=str)))
        torch.manual_seed(self.seed)
        random.seed(self.seed)
        np.random.seed(self.seed)
        for part in what:
            if isinstance(part, dict):
                part.clear()

    def on_start(self, run_dir, config, step):
        assert run_dir.is_dir()
        self._keep("start", config, step)

    def on_step(self, record):
        self._keep("step", record)

    def on_evaluation(self, step, values):
        self._keep("evaluation", step, values)

    def on_round(self, index, values):
        self._keep("round", index, values)

    def on_end(self, summary):
        self._keep("end", summary)


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
    """Nor by one that raises, which is told of with its line."""
    observer = Recorder(3)
    words = (f"callbacks.other._target_={HERE}.Recorder", "callbacks.other.seed=5")
    config = config_of(folder, *words, f"callbacks.bad._target_={HERE}.Fails")
    summary = train(config, "observed", observers=[observer, Returns()])
    weights = [folder / name / "model" / "model.safetensors" for name in ("plain", "observed")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert numbers(folder / "observed") == numbers(folder / "plain")
    lines = [json.loads(line) for line in (folder / "observed" / "metrics.jsonl").read_text().splitlines()]
    told = {
        kind: [rest for first, *rest in observer.told if first == kind] for kind in ("step", "evaluation")
    }
    assert [record for (record,) in told["step"]] == lines
    evaluated = [[r["step"], {k: v for k, v in r.items() if "eval_" in k}] for r in lines if "eval_loss" in r]
    assert told["evaluation"] == [*evaluated, [8, summary["after"]]]
    (kind, settings, step), *_, (last, ended) = observer.told
    assert (kind, step, settings["lr"], last, ended) == ("start", 0, 1e-3, "end", summary)
    err = capsys.readouterr().err.splitlines()
    (said,) = [line for line in err if "callbacks.bad" in line]
    assert sum("observers[1]: on_evaluation failed, TypeError: it returned 0.69" in line for line in err) == 1
    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "1 / (" in text)
    assert f"on_step failed, {__file__}, line {line}: ZeroDivisionError: division by zero" in said


def test_a_stop_ends_the_run_well_and_there_again_when_it_is_resumed(folder, capsys):
    words = (f"callbacks.mine._target_={HERE}.Stops", "callbacks.mine.at=4")
    name, before = "stopped", 4
    summary = train(config_of(folder, *words), name)
    assert summary["stopped_early"] and summary["steps"] == before
    assert summary["stopped_why"].startswith("callbacks.mine asked for it")
    assert f"stopped before step {before}: callbacks.mine asked for it" in capsys.readouterr().out
    assert numbers(folder / name) == numbers(folder / "plain")[:before]
    (folder / name / "summary.json").unlink()
    shutil.rmtree(folder / name / "model")
    again = train(config_of(folder, *words, "resume=true"), name)
    assert (again["steps"], again["after"]) == (before, summary["after"])
    without = train(config_of(folder, "resume=true"), name)
    assert without["steps"] == 8 and not without["stopped_early"]
    weights = [folder / run / "model" / "model.safetensors" for run in ("plain", name)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_rounds_are_told_and_may_be_the_last():
    class Rounds:
        def on_round(self, index, values):
            return f"reward {values['reward']}" if index == 1 else None

    observers = Observers.of({}, [Rounds()], start())
    observers.tell("on_round", 0, {"reward": 0.5}, stop_at=3)
    assert observers.stops(3) is None
    observers.tell("on_round", 1, {"reward": 0.25}, stop_at=7)
    assert observers.stops(6) is None and "observers[0] asked for it: reward 0.25" in str(observers.stops(7))
    again = Observers.of({}, [Recorder()], start())
    again.restore(json.loads(json.dumps(observers.state())))
    assert again.stops(7) == observers.stops(7)
    nobody = Observers()
    nobody.restore(observers.state())
    assert nobody.stops(7) is None
