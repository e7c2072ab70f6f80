"""Checkpoints of a run whose ``keep_best`` changes: each metric ranks by its own values."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jobs.ranking import Patience, RankedCheckpoints, Ranking
from jobs.saving import Saver
from models.distributed import start
from trainers.dealing import Progress

EVALUATED: list[dict[str, float | None]] = [
    {"eval_loss": 0.9, "eval_accuracy": 0.25},
    {"eval_loss": 0.7, "eval_accuracy": 0.75},
    {},
    {"eval_loss": 0.3, "eval_accuracy": None},
    {"eval_loss": 0.5, "eval_accuracy": 0.5},
    {},
]


def test_the_best_is_that_of_the_metric_asked_for_now(tmp_path: Path) -> None:
    """Whatever metric ranked the checkpoints, one per step, when the run wrote them."""
    for step, evaluated in enumerate(EVALUATED):
        (path := tmp_path / f"step_{step:08d}").mkdir()
        score = Ranking("eval_loss").score(evaluated)
        state = {"evaluated": evaluated, "score": score, "keep_best": "eval_loss"}
        (path / "state.json").write_text(json.dumps(state))
    for now, best in (("eval_loss", 3), ("eval_accuracy", 1), ("eval_other", None), (None, None)):
        kept = RankedCheckpoints(tmp_path, start(), 2, False, Ranking(now))
        assert kept.best() == (None if best is None else kept.path(best))
    RankedCheckpoints(tmp_path, start(), 2, False, Ranking("eval_accuracy"))._forget()
    assert {path.name[-1] for path in tmp_path.iterdir()} == {"1", "4", "5"}


COUNTED = {"best": 0.75, "no_better": 1}


def test_patience_does_not_compare_two_metrics(capsys) -> None:
    for before, now, goes_on in (
        ("eval_accuracy", "eval_accuracy", True),
        ("eval_accuracy", "eval_loss", False),
        (None, "eval_loss", False),
    ):
        trainer = SimpleNamespace(load_state_dict=lambda *of: None, progress=Progress(step=3), world=start())
        saver: Any = SimpleNamespace(trainer=trainer, log=SimpleNamespace(restore=lambda state: None))
        saver.diagnostics, saver.patience, saver.ranking = None, Patience(2), Ranking(now)
        Saver._restore(saver, {"patience": COUNTED, "keep_best": before}, {})
        assert saver.patience.state() == (COUNTED if goes_on else {"best": None, "no_better": 0})
        said = capsys.readouterr().out
        assert (said == "") is goes_on and (goes_on or f"keep_best was {before} and is eval_loss now" in said)
