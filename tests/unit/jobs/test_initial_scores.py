"""What the initial weights think of the data: a group's place, what is remembered of a selection, what can be
clipped. Their scores are those of the same weights in the same architecture; before step 0 policy and
reference are the same weights, and what the gate says where their log-probabilities are not."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest
import torch

from common.errors import ConfigError, StoppedError
from data.batches import dealing
from data.quality import select
from jobs import initial_scores as module
from jobs.initial_scores import (
    OfRows,
    completion_means,
    group_means,
    initial_scores,
    kept_before,
    score_groups,
    scored_with,
)
from jobs.step_log import check_first_scores
from models.distributed import start
from models.loading import load_sharded
from models.reference import Reference
from tests.engine import engine_config, make_segment, make_trainer
from tests.tiny import ROOT, make_config, random_groups, tiny_policy


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"transformers_version": "4.0.0", "torch_dtype": "bfloat16", "_name_or_path": "/elsewhere"}, True),
        ({"rope_parameters": {"rope_theta": 10.0, "rope_type": "default"}}, False),
    ],
)
def test_equal_weights_in_another_architecture_have_scores_of_their_own(tmp_path, fields, same):
    world, keys, folder = start(), [], tmp_path / "model"
    shutil.copytree(ROOT / "assets/adder/model", folder)
    read = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(read | fields))
    for words in ([], [f"model.name_or_path={folder}"]):
        config = make_config(*words)
        _, weights = load_sharded(config.model, world)
        keys.append(scored_with(config.model, weights, "text", world))
    assert keys[0]["weights"] == keys[1]["weights"]
    assert (keys[0] == keys[1]) is same


@pytest.mark.parametrize(("loss", "alike"), [("dpo", True), ("grpo", True), ("kto", False)])
def test_scores_are_scored_anew_only_where_rows_are_dealt_otherwise(tmp_path, loss, alike):
    """Checkpointing moves no row to another rank. Humanline moves KTO's alone, whose mismatched rows it makes
    dearer beside the others."""
    ways = [], ["model.activation_checkpointing=true"], ["humanline=true"]
    trainers = [make_trainer(engine_config(tmp_path, loss, *words)) for words in ways]
    said = [dealing(True, work=trainer.dealer.work) for trainer in trainers]
    assert said[0] == said[1] and (said[0] == said[2]) is alike


STALE, OVERFLOW = (
    r"a stale score cache.*Delete",
    r"not finite .* before step 0, though its weights are: .*float32 and",
)


@pytest.mark.parametrize(
    ("spoil", "overflows", "said"),
    [(None, False, None), *((x, False, STALE) for x in (-3.0, math.nan, -math.inf)), (None, True, OVERFLOW)],
)
def test_first_scores_are_the_policys_or_say_why_not(tmp_path, spoil, overflows, said):
    """``spoil`` takes the place of a score; weights that are finite may be too large to compute with."""
    policy = tiny_policy()
    if overflows:
        with torch.no_grad():
            policy.model.model.layers[0].mlp.up_proj.weight.fill_(3e38)
    config = engine_config(tmp_path, "dpo", "model.batch_size=4")
    trainer, segment = make_trainer(config, policy), make_segment(config, 8)
    batches = [segment.batch(i) for i in range(segment.steps)]
    scored = (trainer, batches, trainer.dealer.size, trainer.reference, {"weights": "test"}, "score")
    trainer.reference.scores = dict(initial_scores(*scored))
    if spoil is not None:
        trainer.reference.scores[trainer.reference.key(0, batches[0][1].rows[0])][0] = spoil
    scores = trainer.scorer.score(0, trainer.dealer.microbatches(batches[0])[0].sequences)
    if said is None:
        check_first_scores(config, scores)
        return
    with pytest.raises(StoppedError, match=said) as error:
        check_first_scores(config, scores)
    assert ("cache" in str(error.value)) is not overflows


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
    share = module.clippable_share(groups, scores, -(tokens[7] + tokens[8]) / 2)
    assert share == pytest.approx(8 / len(tokens))


@pytest.mark.parametrize("window", [5, 100])
def test_rows_that_are_scored_alone_come_in_windows(tmp_path, monkeypatch, window):
    """Each row once."""
    groups = random_groups(9, seed=3, kind="pairs")
    config = engine_config(tmp_path, "dpo", "reference_batch_size=4")
    trainer, batches = make_trainer(config), [list(group) for group in groups]
    rows = [row for group in groups for example in group for row in example.rows]
    monkeypatch.setattr(module, "WINDOW", window)
    missing, reference = np.array([row.key.encode() for row in rows]), Reference(by_row=True)
    work = module._work(trainer, batches, missing, 4, reference)
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
