"""Where one of several ranks runs out of memory, all end with one message that has the number to type."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from common.ports import free_port
from tests.programs import start
from tests.tiny import make_config
from train import train
from trainers.basic import BasicTrainer

SMALL = (
    *("loss=dpo", "n_examples=24", "model.batch_size=12", "n_eval_examples=4", "n_eval_prompts=2"),
    *("wandb.enabled=false", "diagnostics=false", "report=false"),
)


def worker(rank: int, ranks: int, port: int, folder: str) -> None:
    """Train as one of the ranks; the last has no memory left in its second step."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test"}
    compute = BasicTrainer.mean_loss

    def fails(self: BasicTrainer, *arguments: Any) -> Any:
        if self.world.rank == ranks - 1 and self.progress.step == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return compute(self, *arguments)

    BasicTrainer.mean_loss = fails  # type: ignore[method-assign]
    train(make_config(*SMALL, f"runs_dir={folder}", f"cache_dir={folder}/cache"), "short")


def test_one_rank_without_memory_ends_all_with_the_number_to_type(tmp_path: Path) -> None:
    arguments = f"2, {free_port()}, {str(tmp_path)!r}"
    code = f"import sys; from {__name__} import worker as f; f(int(sys.argv[1]), {arguments})"
    began, ranks = time.monotonic(), [start("-c", code, str(rank)) for rank in range(2)]
    codes = [rank.wait() for rank in ranks]
    assert all(codes) and time.monotonic() - began < 300
    printed = [rank.said() for rank in ranks]
    for words in printed:
        assert "rank 1 failed: ShortOfMemoryError: out of memory (CUDA out of memory. " in words
        assert "in a step, use model.microbatch_tokens=" in words
    assert "StoppedError" in printed[0] or "ShareError" in printed[0]
