"""Scores under the initial weights are those of the same weights in the same architecture."""

from __future__ import annotations

import pytest

from jobs.initial_scores import scored_with
from models.distributed import start
from models.loading import load_sharded
from tests.tiny import make_config
from tests.unit.rollouts.test_generate import edited


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
