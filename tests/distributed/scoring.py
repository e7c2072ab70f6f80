"""A run whose rounds are sampled ahead and scored by a reward model, as one of its ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import jobs.online
from models.export import full_state
from rollouts.rewards.models import ModelReward
from tests.distributed.joining import join
from tests.integration.online import SHORT
from tests.integration.test_lag import LAGGING, Second
from tests.tiny import make_config
from train import train


class Beside(Second):
    """The engine on rank 0, of a policy that is on all of them."""

    def publish(self, folder, version, keep):
        state = full_state(self.policy)

        def write() -> None:
            folder.mkdir(parents=True)
            torch.save(state, folder / "weights.pt")
            self.other.model.load_state_dict(state)

        self.ranks.on_main(write)
        return {}


def lagging(rank: int, ranks: int, store: str, folder: str, armorm: str) -> None:
    """``scored-RANK.json`` says how many batches this rank scored."""
    scored: list[int] = []
    of_batch = ModelReward._of_batch

    def noted(self, rows):
        scored.append(len(rows))
        return of_batch(self, rows)

    join(rank, ranks, store)
    limits = ("max_length=400", "max_prompt_length=200", "dtype=float32", "batch_tokens=600")
    words = [f"reward.armorm.{word}" for word in (f"name_or_path={armorm}", *limits)]
    places = (f"runs_dir={folder}", f"cache_dir={folder}/cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs.online, "make_sampler", Beside)
        patch.setattr(ModelReward, "_of_batch", noted)
        train(make_config(*SHORT, *places, *LAGGING, "rounds.contexts=24", "reward=armorm", *words), "r")
    (Path(folder) / f"scored-{rank}.json").write_text(json.dumps(len(scored)))
