"""A run that goes on longer than it was planned to, or is evaluated at other steps."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from common.errors import ConfigError, Requeue
from jobs.watch import RunWatch
from tests.tiny import make_config
from train import train

SETTINGS = (
    "humanline=true",
    "sync_freq=3",
    "model.batch_size=4",
    "n_eval_examples=4",
    "wandb.enabled=false",
    "lr=1e-3",
    "warmup=0.5",
    "data.verifier=null",
    "retention.kl=false",
    "diagnostics=false",
    "report=false",
    "resume=true",
)
FIRST, SECOND = 22, 38
"""Examples: five steps and a half, and then four steps more."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(train as far as so many examples, with other settings; the folder of the runs)."""
    folder = tmp_path_factory.mktemp("runs")

    def go(name: str, examples: int, *more: str):
        here = (f"runs_dir={folder}", f"cache_dir={folder / 'cache'}", f"n_examples={examples}")
        train(make_config("loss=dpo", *here, *SETTINGS, *more), name)

    go("longer", FIRST)
    go("longer", SECOND)
    return go, folder


def lines(folder, name):
    records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if k != "seconds" and "tokens_per_second" not in k} for r in records]


def weights(folder, name):
    return load_file(folder / name / "model" / "model.safetensors")


def test_the_first_stretch_stays_as_it_was_and_the_second_has_the_rate_that_it_ended_with(run):
    go, folder = run
    go("short", FIRST)
    short, longer = lines(folder, "short"), lines(folder, "longer")
    assert [line["step"] for line in longer] == list(range(10))
    assert [line["examples"] for line in longer] == [4, 8, 12, 16, 20, 22, 26, 30, 34, 38]
    assert [line["lr"] for line in longer[6:]] == [1e-3] * 4
    kept = ("loss", "lr", "grad_norm", "examples", "reference_step")
    assert [[line[key] for key in kept] for line in longer[:6]] == [
        [line[key] for key in kept] for line in short
    ]
    one, two = weights(folder, "short"), weights(folder, "longer")
    assert any(not torch.equal(one[key], two[key]) for key in one)
    assert all(line["loss"] > 0 and line["grad_norm"] > 0 for line in longer)


def test_a_longer_run_that_is_asked_to_stop_goes_on_as_if_it_had_not_been(run, monkeypatch):
    go, folder = run
    go("stopped", FIRST)
    real = RunWatch.before_step

    def ask(self, segment):
        self.signals.asked = self.trainer.progress.step == 8
        real(self, segment)

    with monkeypatch.context() as patch:
        patch.setattr(RunWatch, "before_step", ask)
        with pytest.raises(Requeue):
            go("stopped", SECOND)
    go("stopped", SECOND)
    one, two = weights(folder, "longer"), weights(folder, "stopped")
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert lines(folder, "stopped") == lines(folder, "longer")


def test_a_shorter_one_and_one_whose_rate_has_ended_are_refused(run):
    go, _ = run
    with pytest.raises(ConfigError, match=f"n_examples={FIRST}: was {SECOND}.*not shorter"):
        go("longer", FIRST)
    with pytest.raises(ConfigError, match=rf"n_examples=45: was {SECOND}.*scheduler=cosine was constant"):
        go("longer", 45, "scheduler=cosine")


def test_evaluations_at_other_steps_change_nothing_that_is_trained(run):
    go, folder = run
    go("asked", FIRST, "eval_every=12")
    go("asked", SECOND, "eval_every=4", "save_every=8")
    one, two = weights(folder, "longer"), weights(folder, "asked")
    assert all(torch.equal(one[key], two[key]) for key in one)
    evaluated = [line["step"] for line in lines(folder, "asked") if "eval_loss" in line]
    assert evaluated == [0, 3, 6, 7, 8, 9]
