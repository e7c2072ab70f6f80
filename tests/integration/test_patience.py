"""Stopping early: after as many evaluations without a better one as asked for, and at the same step again
after a resume."""

from __future__ import annotations

import json
import shutil

from jobs.ranking import Patience
from reports.report import final_table
from tests.tiny import make_config
from train import train

EARLY = ("loss=dpo", "lr=1e-3", "model.batch_size=8", "n_examples=240", "eval_every=16", "n_eval_examples=8")
EARLY += ("n_eval_prompts=16", "keep_best=eval_accuracy_sampled", "patience=2", "wandb.enabled=false")
EARLY += ("diagnostics=false", "report=false")


def test_patience_counts_from_the_best():
    patience = Patience(2)
    for score, spent in ((0.5, False), (0.4, False), (None, False), (0.6, False), (0.6, False), (0.5, True)):
        patience.judge(score)
        assert patience.spent is spent
    again = Patience(2)
    again.restore(json.loads(json.dumps(patience.state())))
    assert again.spent and again.best == 0.6
    endless = Patience(None)
    for _ in range(50):
        endless.judge(0.0)
    assert not endless.spent


def test_a_run_stops_and_stops_there_again_when_it_is_resumed(tmp_path):
    places = (f"runs_dir={tmp_path}", f"cache_dir={tmp_path}/cache")
    summary = train(make_config(*EARLY, *places), "run")
    run = tmp_path / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seen = [(line["step"], line[k]) for line in lines if (k := "eval_accuracy_sampled") in line]
    best = max(seen, key=lambda one: one[1])
    assert summary["stopped_early"] and summary["steps"] < 30
    assert f"stopped early: {summary['stopped_why']}" in final_table(summary)
    assert "were no better than the best before them" in summary["stopped_why"]
    assert len([one for one in seen if one[0] > best[0]]) + 1 == 2, "the last one stands in the summary"
    weights = (run / "model" / "model.safetensors").read_bytes()
    shutil.rmtree(run / "checkpoints" / f"step_{summary['steps']:08d}")
    (run / "summary.json").unlink()
    shutil.rmtree(run / "model")
    again = train(make_config(*EARLY, "resume=true", *places), "run")
    assert again["steps"] == summary["steps"] and again["after"] == summary["after"]
    assert (run / "model" / "model.safetensors").read_bytes() == weights
