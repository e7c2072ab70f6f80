"""Scores under the initial weights are those of the same weights in the same architecture."""

from __future__ import annotations

import pytest

from data.batches import dealing
from jobs.initial_scores import scored_with
from models.distributed import start
from models.loading import load_sharded
from tests.engine import engine_config, make_trainer
from tests.tiny import make_config
from tests.unit.rollouts.test_answers import edited


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"transformers_version": "4.0.0", "torch_dtype": "bfloat16", "_name_or_path": "/elsewhere"}, True),
        ({"rope_parameters": {"rope_theta": 10.0, "rope_type": "default"}}, False),
        ({"rms_norm_eps": 1e-2}, False),
    ],
)
def test_equal_weights_in_another_architecture_have_scores_of_their_own(tmp_path, fields, same):
    world, keys = start(), []
    for words in ([], [edited(tmp_path / "model", **fields)]):
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
