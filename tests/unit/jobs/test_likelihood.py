"""What the initial weights think of the data: a group's place, what is remembered of a selection, what can be
clipped."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.errors import ConfigError
from data.quality import select
from jobs import initial_scores
from jobs.initial_scores import OfRows, completion_means, group_means, kept_before, score_groups
from models.reference import Reference
from tests.engine import engine_config, make_trainer
from tests.tiny import random_groups, tiny_policy


def by_hand(row) -> list[float]:
    """The log-probability of each completion token, from a float64 model's logits, one row at a time."""
    ids = np.concatenate([row.prompt_ids, row.completion_ids]).astype(np.int64)
    with torch.no_grad():
        table = tiny_policy().model.double()(torch.from_numpy(ids)[None]).logits[0].log_softmax(-1)
    return [float(table[t - 1, ids[t]]) for t in range(len(row.prompt_ids), len(ids))]


@pytest.mark.parametrize(("loss", "kind"), [("dpo", "pairs"), ("kto", "labelled"), ("grpo", "weighted")])
def test_a_groups_place_is_the_mean_over_all_its_completion_tokens(tmp_path, loss, kind):
    """For every loss the same pairs."""
    groups = random_groups(9, seed=3, kind=kind)
    trainer = make_trainer(engine_config(tmp_path, loss, "humanline=true"))
    scores = score_groups(trainer, groups, {"weights": "test"})
    rows = [row for group in random_groups(9, seed=3, kind="pairs") for row in group[0].rows]
    expected, kinds = [by_hand(row) for row in rows], completion_means(groups, scores)
    pooled = [a + b for a, b in zip(expected[::2], expected[1::2], strict=True)]
    for found, wanted in (
        (group_means(groups, scores), pooled),
        (kinds["chosen"], expected[::2]),
        (kinds["rejected"], expected[1::2]),
    ):
        np.testing.assert_allclose(found, [np.mean(tokens) for tokens in wanted], rtol=0, atol=1e-5)
    tokens = sorted(x for row in expected for x in row)
    share = initial_scores.clippable_share(groups, scores, -(tokens[7] + tokens[8]) / 2)
    assert share == pytest.approx(8 / len(tokens))


@pytest.mark.parametrize("window", [5, 100])
def test_rows_that_are_scored_alone_come_in_windows(tmp_path, monkeypatch, window):
    """Each row once."""
    groups = random_groups(9, seed=3, kind="pairs")
    config = engine_config(tmp_path, "dpo", "reference_batch_size=4")
    trainer, batches = make_trainer(config), [list(group) for group in groups]
    rows = [row for group in groups for example in group for row in example.rows]
    monkeypatch.setattr(initial_scores, "WINDOW", window)
    missing, reference = np.array([row.key.encode() for row in rows]), Reference(by_row=True)
    work = initial_scores._work(trainer, batches, missing, 4, reference)
    seen = [row.key for _, micros in work for micro in micros for row in micro.sequences.rows]
    assert sorted(seen) == sorted(row.key for row in rows)
    scores = score_groups(trainer, groups, {"weights": "test"})
    for row in rows:
        np.testing.assert_allclose(scores[row.key], by_hand(row), rtol=0, atol=1e-5)


def test_a_row_has_the_scores_of_the_last_batch_that_has_it():
    (first,), (second,) = random_groups(2, seed=3, kind="pairs")
    batches = [[first, second], [first]]
    scores = {
        f"{i}/{row.key}": torch.full((3,), -float(i + 1))
        for i, batch in enumerate(batches)
        for example in batch
        for row in example.rows
    }
    found = OfRows(scores, np.array([key.encode() for key in scores]))
    wanted = {row.key: -2.0 for row in first.rows} | {row.key: -1.0 for row in second.rows}
    assert {key: found[key].tolist() for key in found} == {key: [v] * 3 for key, v in wanted.items()}
    assert len(found) == 4 and found.get("0" * 32) is None


def test_a_run_that_goes_on_keeps_its_groups(tmp_path):
    first = select(np.linspace(-3, -1, 12), [0.25, 0.75])
    assert kept_before(tmp_path / "selection.json", first) == first
    other = select(np.linspace(-1, -3, 12) - 0.5, [0.5, 1.0])
    assert other.kept != first.kept
    assert kept_before(tmp_path / "selection.json", other).kept == first.kept
    whole, said = (tmp_path / "selection.json").read_text(), r"data\.logprob_range=.* is damaged.*put it back"
    for damaged in (whole[: len(whole) // 2], whole.replace('"kept"', '"x"')):
        (tmp_path / "selection.json").write_text(damaged)
        with pytest.raises(ConfigError, match=said):
            kept_before(tmp_path / "selection.json", other)
