"""How a spawned process becomes a rank."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from models.distributed import World, start, stop
from tests.programs import HANG, Program, finished, started_in_ranks


def join(rank: int, ranks: int, store: str, replicas: int = 1, nodes: int = 1) -> World:
    """This process as ``rank`` of ``ranks``, who meet in the file ``store``."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), TORCHELASTIC_RUN_ID="test")
    os.environ.update(MASTER_ADDR="127.0.0.1", GROUP_RANK=str(rank * nodes // ranks))
    timeout = timedelta(seconds=HANG)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timeout
    )
    return start(replicas)


def world_of(
    worker: Callable[..., None], ranks: int, folder: Path, *more: str, replicas: int = 1, nodes: int = 1
) -> list[Program]:
    """Start ``worker(world, folder, *more)`` in ``ranks`` processes."""
    store = f"{tempfile.mkdtemp(prefix='ranks-')}/store"
    of = (ranks, store, replicas, nodes, worker.__module__, worker.__name__, str(folder), *more)
    return started_in_ranks(_be, of, ranks)


def in_world(worker: Callable[..., None], ranks: int, folder: Path, *more: str, **settings: int) -> None:
    """The same to its end; where one fails, end all and say why."""
    finished(world_of(worker, ranks, folder, *more, **settings))


def _be(
    rank: int,
    ranks: int,
    store: str,
    replicas: int,
    nodes: int,
    module: str,
    name: str,
    folder: str,
    *more: Any,
) -> None:
    world = join(rank, ranks, store, replicas, nodes)
    getattr(import_module(module), name)(world, Path(folder), *more)
    stop()
