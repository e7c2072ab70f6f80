"""Rotary embeddings whose factors depend on the longest row of a batch, and how far others reach."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import GPT2Config, LlamaConfig, MambaConfig, Phi3Config, Phi3ForCausalLM

from common.errors import ConfigError
from data.batches import collate
from data.types import Sequence
from models.checks import reach
from models.policy import Policy
from models.pretrained import check_model
from models.reference import score
from tests.tiny import VOCABULARY
from tests.unit.models.test_families import GROUPED, SIZES
from tests.unit.models.test_policy import settings

SWITCH = 32


def phi3(**more) -> Phi3Config:
    """A tiny Phi-3 whose LongRoPE switches to its long factors beyond ``SWITCH`` tokens."""
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0, 9.0, 16.0, 25.0]}
    reach = {"max_position_embeddings": 128, "original_max_position_embeddings": SWITCH}
    return Phi3Config(**(SIZES | GROUPED | reach | {"rope_parameters": longrope} | more))


def row(seed: int, length: int) -> Sequence:
    ids = np.random.default_rng(seed).integers(3, VOCABULARY, length).astype(np.int32)
    return Sequence(ids[:2], ids[2:])


def test_longrope_is_refused_beyond_its_switch_and_taken_up_to_it(tmp_path):
    """Beyond it a row's score depends on who is scored with it."""
    torch.manual_seed(0)
    policy, short = Policy(Phi3ForCausalLM(phi3())).eval(), row(0, 12)
    alone, within, beyond = (
        score(policy, collate([short, *others], torch.device("cpu")))[0, :10]
        for others in ([], [row(1, SWITCH)], [row(1, SWITCH + 1)])
    )
    assert torch.allclose(alone, within, atol=1e-5) and not torch.allclose(alone, beyond, atol=1e-2)
    phi3().save_pretrained(tmp_path)
    config = settings(tmp_path, max_length=SWITCH, max_prompt_length=8)
    assert check_model(config).model_type == "phi3"
    with pytest.raises(ConfigError, match=rf"model\.max_length=33: .*LongRoPE.* up to {SWITCH} tokens"):
        check_model(replace(config, max_length=SWITCH + 1))
    phi3(rope_parameters=None).save_pretrained(tmp_path)
    assert check_model(replace(config, max_length=128)).model_type == "phi3"


SCALED = {"max_position_embeddings": 48, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}
DYNAMIC = SCALED | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}


@pytest.mark.parametrize(
    ("config", "reached"),
    [
        (GPT2Config(n_positions=48), 48),
        (LlamaConfig(max_position_embeddings=48), None),
        (LlamaConfig(**SCALED), None),
        (LlamaConfig(**DYNAMIC), 48),
        (phi3(), SWITCH),
        (MambaConfig(), None),
    ],
)
def test_how_far_a_row_may_go_on_with_others(config, reached):
    assert reach(config) == reached
