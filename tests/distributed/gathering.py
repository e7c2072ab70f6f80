"""What two ranks run where the memory plan decides whether layers stay gathered until their backward. They
have no GPU: the plan is told of one."""

from __future__ import annotations

import json
import os
from contextlib import redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from memory import decisions
from memory.parts import Card
from models.policy import decoder_blocks
from tests.programs import HANG
from tests.tiny import make_config
from train import train
from trainers.basic import BasicTrainer

SMALL = (
    *("loss=dpo", "humanline=true", "n_examples=24", "model.batch_size=12", "n_eval_examples=4"),
    "n_eval_prompts=2",
    *("wandb.enabled=false", "diagnostics=false", "report=false", "sync_freq=2"),
)


def worker(rank: int, ranks: int, store: str, folder: str, name: str, said: str) -> None:
    """Train a run of this name with model.reshard_after_forward=``said`` on GPUs of 80 GiB. Its output goes
    to ``name``.out, and whether layers were whole between their forward and their backward to
    ``name``.json."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), TORCHELASTIC_RUN_ID="test")
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=HANG),
    )
    decisions.gpu_here = lambda: Card("a card", 80.0)  # type: ignore[attr-defined]
    whole: list[bool] = []
    compute = BasicTrainer.step

    def step(self: BasicTrainer, *arguments: Any) -> Any:
        loss = self.compute_loss

        def watched(*given: Any) -> Any:  # after the forward passes of a microbatch
            parameters = [p for block in decoder_blocks(self.policy) for p in block.parameters()]
            whole.append(not any(isinstance(p, DTensor) for p in parameters))
            return loss(*given)

        self.compute_loss = watched  # type: ignore[method-assign]
        try:
            return compute(self, *arguments)
        finally:
            self.compute_loss = loss  # type: ignore[method-assign]

    BasicTrainer.step = step  # type: ignore[method-assign]
    config = make_config(
        *SMALL,
        f"runs_dir={folder}",
        f"cache_dir={folder}/cache-{name}",
        f"model.reshard_after_forward={said}",
    )
    with open(f"{folder}/{name}-{rank}.out", "w") as out, redirect_stdout(out):
        train(config, name)
    Path(folder, f"{name}-{rank}.json").write_text(json.dumps(whole))
