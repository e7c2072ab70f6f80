"""Scores under the initial weights are those of the same weights in the same architecture; and before step 0
policy and reference are the same weights: what the gate says where their log-probabilities are not."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from common.errors import StoppedError
from data.batches import dealing
from jobs.initial_scores import initial_scores, scored_with
from jobs.step_log import check_first_scores
from models.distributed import start
from models.loading import load_sharded
from tests.engine import engine_config, make_segment, make_trainer
from tests.tiny import make_config, tiny_policy

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"transformers_version": "4.0.0", "torch_dtype": "bfloat16", "_name_or_path": "/elsewhere"}, True),
        ({"rope_parameters": {"rope_theta": 10.0, "rope_type": "default"}}, False),
        ({"rms_norm_eps": 1e-2}, False),
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
