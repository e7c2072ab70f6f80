"""How a spawned process becomes a rank."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from models.distributed import World, start
from tests.programs import HANG


def join(rank: int, ranks: int, store: str, replicas: int = 1) -> World:
    """This process as ``rank`` of ``ranks``, who meet in the file ``store``."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), TORCHELASTIC_RUN_ID="test")
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    timeout = timedelta(seconds=HANG)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timeout
    )
    return start(replicas)
