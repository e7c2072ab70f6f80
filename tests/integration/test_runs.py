"""Runs as a whole, on the embedded task: what they leave. That they go on after anything as if nothing had been:
test_kills.py."""  # noqa: E501

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.errors import StoppedError
from tests.integration.online import lines
from tests.tiny import ROOT, make_config
from train import train
from trainers.paired import PairedPreferenceTrainer

SMALL = ("n_examples=48", "model.batch_size=4", "n_eval_examples=8", "wandb.enabled=false", "lr=1e-3")
SMALL += ("data.verifier=null", "diagnostics=false", "retention.kl=false")
WANTED = """
step examples tokens tokens_per_second tokens_per_second_per_rank token_balance seconds lr
loss grad_norm reward_chosen reward_rejected reward_margin reward_accuracy
reference_step kl drift clipped_low clipped_high
"""
"""What a line of metrics has."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def settings(folder: Path, cache: Path, *more: str):
    return make_config(f"runs_dir={folder}", f"cache_dir={cache}", *SMALL, *more)


def test_what_a_run_leaves_loads_in_transformers_and_chains(tmp_path, cache):
    summary = train(settings(tmp_path, cache, "loss=kto", "humanline=true", "eval_every=24"), "run")
    run = tmp_path / "run"
    model, tokenizer = (cls.from_pretrained(run / "model") for cls in (AutoModelForCausalLM, AutoTokenizer))
    assert model.dtype == torch.float32 and tokenizer.chat_template
    base = AutoModelForCausalLM.from_pretrained(ROOT / "assets/adder/model")
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), base.parameters(), strict=True))
    assert all(set(WANTED.split()) <= set(line) for line in lines(run))
    assert [bool("eval_loss" in line) for line in lines(run)] == [i in (0, 6) for i in range(12)]
    assert summary["before"]["eval_reward_margin"] == 0.0 and summary["before"]["eval_reward_accuracy"] == 0.5
    left = ("config.yaml", "data_report.md", "report.html", "model/README.md", "model/generation_config.json")
    assert all((run / name).stat().st_size > 0 for name in left)
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


def test_a_dry_run_writes_nothing(tmp_path, cache, capfd):
    described = train(settings(tmp_path / "runs", tmp_path / "cache", "dry_run=true"), "run")
    assert described["steps"] == 12 and not (tmp_path / "runs").exists() and not (tmp_path / "cache").exists()
    out = capfd.readouterr().out
    assert "12 steps of 4" in out and "GiB" in out and "2,560 rows read" in out


def test_gradients_that_are_not_finite_stop_the_run_after_n_and_leave_their_batches(
    tmp_path, cache, monkeypatch
):
    real = PairedPreferenceTrainer.compute_loss

    def poisoned(self, micro, scores, prepared):
        result = real(self, micro, scores, prepared)
        if self.progress.step in (2, 4, 5, 6):
            return type(result)(result.total * float("nan"), result.metrics)
        return result

    monkeypatch.setattr(PairedPreferenceTrainer, "compute_loss", poisoned)
    with pytest.raises(StoppedError, match="3 updates in a row"):
        train(settings(tmp_path, cache, "max_skipped_steps=3"), "run")
    records = lines(tmp_path / "run")
    assert [r["step"] for r in records if r.get("skipped")] == [2, 4, 5, 6]
    assert all(r["loss"] == r["loss"] and r["loss"] is not None for r in records if r["step"] in (1, 3))
    left = sorted((tmp_path / "run" / "skipped").iterdir())
    assert len(left) == 4 and len(left[0].read_text().splitlines()) == 4
