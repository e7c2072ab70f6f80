"""What a run shows while it goes on, and says of rounds and runs that teach nothing; and checkpoints of a run
whose ``keep_best`` changes: each metric ranks by its own values."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobs.saving import Patience, RankedCheckpoints, Ranking, Saver
from jobs.step_log import StepLog, without_signal
from models.distributed import start
from reports.outcome import outcome, symptoms, text_of
from reports.report import final_table
from tests.tiny import make_config
from trainers.dealing import Progress


def test_a_run_on_several_ranks_looks_once_whether_its_forward_gathers_what_it_keeps(tmp_path, monkeypatch):
    looked: list[Any] = []
    monkeypatch.setattr("jobs.step_log.check_gathered_weights", looked.append)
    at: Any = SimpleNamespace(world=SimpleNamespace(size=2, is_main=False), progress=SimpleNamespace(step=0))
    log: Any = StepLog(tmp_path, at, 4)
    log.flush, log._of_round = lambda: None, lambda record: {}
    for _ in range(3):
        log.step_begins()
        log.step_ends(SimpleNamespace(known={}))
    assert looked == [at]


ALL = r"all rewards lie in \[0, 1\], and no two of a prompt differ \(rounds\.tau=0\.01\), so"
UNKNOWN = {"lowest_reward": None, "highest_reward": None, "keep_rate": 0.0}


@pytest.mark.parametrize(
    ("feedback", "metrics", "said"),
    [
        ("pair", {}, None),
        ("pair", {"keep_rate": 0.0}, ALL),
        ("pair", UNKNOWN, "no sample has a reward"),
        ("threshold", {"zero_variance": 1.0}, None),
        ("threshold", {"lowest_reward": 1.0 - 1e-9}, r"all rewards lie in \[1, 1\], so"),
    ],
)
def test_a_round_without_a_signal_is_told_with_its_rewards_and_what_to_change(feedback, metrics, said):
    config = make_config("online=true", "loss=kto", f"rounds.feedback={feedback}")
    known = {"lowest_reward": 0.0, "highest_reward": 1.0, "zero_variance": 0.5, "keep_rate": 0.5}
    found = without_signal(3, known | metrics, config)
    assert (found is None) == (said is None)
    if found is not None:
        assert found.startswith("warning: round 3: ") and "sampler.temperature (0.7 now)" in found
        assert re.search(said, found)


SKIPPED = "3 of 4 updates skipped, as their gradients were not finite"


@pytest.mark.parametrize(
    ("skipped", "silent", "why", "said"),
    [
        (0, 0, None, None),
        (0, 0, "it was enough", "stopped early: it was enough"),
        (3, 0, None, SKIPPED),
        (3, 1, "it was enough", f"nothing learnt: {SKIPPED}; 1 of 4 upd"),
    ],
)
def test_an_ending_says_what_every_update_came_to(skipped, silent, why, said):
    summary = {"steps": 4} | outcome(4, skipped, silent, why)
    found = text_of(summary)
    assert bool(symptoms(summary)) == bool(skipped or silent)
    assert found is None if said is None else found is not None and found.startswith(said)


@pytest.mark.parametrize(
    ("grown", "kl", "said"),
    [
        (12.0, 0.5, "answers grew by 12 tokens"),
        (0.0, 1.26, "the KL divergence from the start is 1.26 nats a token"),
    ],
)
def test_a_run_that_has_gone_far_from_its_start_says_so(grown, kl, said):
    after = {"eval_length_sampled": 20.0 + grown, "eval_kl_initial": kl}
    summary = {"before": {"eval_length_sampled": 20.0}, "after": after} | outcome(8, 0, 0, None)
    assert text_of(summary) == said
    assert said is None or said in final_table(summary)


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
        state = {"evaluated": evaluated, "keep_best": "eval_loss"}
        (path / "state.json").write_text(json.dumps(state))
    for now, best in (("eval_loss", 3), ("eval_accuracy", 1), ("eval_other", None), (None, None)):
        kept = RankedCheckpoints(tmp_path, start(), 2, False, Ranking(now))
        assert kept.best() == (None if best is None else kept.path(best))
    RankedCheckpoints(tmp_path, start(), 2, False, Ranking("eval_accuracy"))._forget()
    assert {path.name[-1] for path in tmp_path.iterdir()} == {"1", "4", "5"}


def test_patience_does_not_compare_two_metrics() -> None:
    for before, now, goes_on in (
        ("eval_accuracy", "eval_accuracy", True),
        ("eval_accuracy", "eval_loss", False),
        (None, "eval_loss", False),
    ):
        trainer = SimpleNamespace(load_state_dict=lambda *of: None, progress=Progress(step=3), world=start())
        saver: Any = SimpleNamespace(trainer=trainer, log=SimpleNamespace(restore=lambda state: None))
        saver.diagnostics, saver.patience, saver.ranking = None, Patience(2), Ranking(now)
        Saver._restore(saver, {"patience": {"best": 0.75, "no_better": 1}, "keep_best": before}, {})
        assert saver.patience == (Patience(2, 0.75, 1) if goes_on else Patience(2))
