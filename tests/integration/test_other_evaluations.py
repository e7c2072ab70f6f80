"""A run that goes on and is evaluated at other steps."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from common.errors import Requeue
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


def lines(folder, name):
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def test_evaluations_at_other_steps_change_nothing_that_is_trained(tmp_path, monkeypatch):
    """Stopped before step 4, and gone on with."""

    def go(name: str, *more: str):
        here = (f"runs_dir={tmp_path}", f"cache_dir={tmp_path / 'cache'}", "n_examples=38")
        train(make_config("loss=dpo", *here, *SETTINGS, *more), name)

    real = RunWatch.before_step

    def ask(self, segment):
        self.signals.stop_requested = self.trainer.progress.step == 4
        real(self, segment)

    go("whole")
    with monkeypatch.context() as patch:
        patch.setattr(RunWatch, "before_step", ask)
        with pytest.raises(Requeue):
            go("asked", "eval_every=12")
    go("asked", "eval_every=4", "save_every=8")
    one, two = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "asked"))
    assert all(torch.equal(one[key], two[key]) for key in one)
    evaluated = [line["step"] for line in lines(tmp_path, "asked") if "eval_loss" in line]
    assert evaluated[0] == 0 and evaluated[-5:] == [5, 6, 7, 8, 9]
