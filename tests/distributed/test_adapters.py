"""Adapters of a policy in shards: what is written of them is what its ranks compute with."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from models.policy import Policy
from models.reference import score
from tests.distributed.adapters import noisy
from tests.programs import in_ranks
from tests.unit.models.test_policy import batch


def test_noise_on_shards_is_gathered_as_it_is_computed_with(tmp_path):
    in_ranks(noisy, (2, str(tmp_path / "store"), str(tmp_path)), 2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "adapters", dtype=torch.float32)
    found = score(Policy(model).eval(), batch())
    assert torch.allclose(found, torch.load(tmp_path / "scores.pt"), atol=1e-5)
