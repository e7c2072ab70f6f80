"""Where one of several ranks runs out of memory, all end within a minute with one message that has the number
to type, also outside of steps (test_ranks.py)."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from common.ports import free_port
from jobs.evaluation import Evaluator
from models.reference import Reference
from rollouts.embedded import EmbeddedSampler
from tests.programs import start
from tests.tiny import make_config
from train import train

WORDS = (
    *("loss=dpo", "humanline=true", "model.batch_size=12", "n_eval_examples=4", "n_eval_prompts=2"),
    *("wandb.enabled=false", "diagnostics=false", "report=false"),
)
OFFLINE = ("n_examples=24",)
ROUNDS = (
    *("online=true", "retention.kl=false", "rounds.contexts=24", "rounds.contexts_per_round=12"),
    *("rounds.samples=2", "sampler.max_tokens=8"),
)
PLACES: dict[str, tuple[type, str, tuple[str, ...]]] = {
    "first scores": (Reference, "scored", OFFLINE),
    "evaluation": (Evaluator, "evaluate", OFFLINE),
    "round": (EmbeddedSampler, "share", ROUNDS),
}
"""Where memory is short: (class, its method, further settings)."""


def worker(rank: int, place: str, ranks: int, port: int, folder: str) -> None:
    """Train as one of the ranks; the last has no memory left at a place, the answers of a round among them,
    which are two to a prompt."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test"}
    owner, name, words = PLACES[place]
    compute = getattr(owner, name)

    def fails(self: Any, *arguments: Any, **more: Any) -> Any:
        if rank == ranks - 1 and (place != "round" or arguments[1] == 2):
            (Path(folder) / "failed").touch()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return compute(self, *arguments, **more)

    setattr(owner, name, fails)
    train(make_config(*WORDS, *words, f"runs_dir={folder}", f"cache_dir={folder}/cache"), "short")


@pytest.mark.parametrize("place", PLACES)
def test_one_rank_without_memory_ends_all_with_the_number_to_type(tmp_path: Path, place: str) -> None:
    arguments = f"{place!r}, 2, {free_port()}, {str(tmp_path)!r}"
    code = f"import sys; from {__name__} import worker as f; f(int(sys.argv[1]), {arguments})"
    ranks = [start("-c", code, str(rank)) for rank in range(2)]
    codes = [rank.wait() for rank in ranks]
    assert all(codes)
    printed = [rank.said() for rank in ranks]
    assert (tmp_path / "failed").exists(), printed
    assert time.time() - (tmp_path / "failed").stat().st_mtime < 60
    for words in printed:
        assert "rank 1 failed: ShortOfMemoryError: out of memory (CUDA out of memory. " in words
        assert "in a step, use model.microbatch_tokens=" in words and "model.eval_batch_size=" in words
    assert "StoppedError" in printed[0] or "ShareError" in printed[0]
