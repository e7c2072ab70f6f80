"""What every rank runs: updates of 8-bit moments of matrices of all shapes, and of models that go on from
checkpoints of as many and of other ranks. It needs torchao."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.checkpoint import Checkpoints
from models.distributed import World, local
from optimizers import adamw8bit
from optimizers.build import update
from tests.distributed.joining import join
from tests.distributed.optimizing import NO, gone_on, push, sharded
from tests.engine import engine_config, make_trainer, weights
from tests.tiny import tiny_policy

SHAPES = ((2, 4096), (9, 1024), (3, 8, 512), (600, 8), (40, 300), (131, 37), (5000,), (3, 5))
"""Fewer rows than ranks, rows that do not divide, experts, short blocks, moments in float32."""
EIGHT = ("optimizer=AdamW8bit", "weight_decay=0.1")


def moved(world: World) -> dict[str, Tensor]:
    """Matrices, and what is kept of their moments, after three updates."""
    torch.manual_seed(0)
    params = [nn.Parameter(sharded(torch.randn(shape), world)) for shape in SHAPES]
    optimizer = adamw8bit.AdamW8bit(params, lr=0.0, betas=(0.9, 0.99), eps=1e-5, weight_decay=0.1)
    for _ in range(3):
        for p in params:
            p.grad = sharded(torch.randn(p.shape), world)
        update(optimizer, 0.03, NO)
    found = {str(shape): local(p.detach()) for shape, p in zip(SHAPES, params, strict=True)}
    for shape, p in zip(SHAPES, params, strict=True):
        found |= {f"{shape} {name}": local(value) for name, value in optimizer.state[p].items()}
    return found


def from_one_rank(folder: Path, world: World) -> dict[str, Tensor]:
    """The weights after an update that begins with the checkpoint of a single rank."""
    config = engine_config(folder / "cache", "dpo", *EIGHT)
    trainer = make_trainer(config, tiny_policy(seed=7, tied=False), world)
    kept = Checkpoints(folder / "checkpoints-1", world, 1)
    kept.load(kept.path(2), trainer.policy, trainer.optimizer)
    push(trainer, 3)
    return {f"from one rank, {name}": value for name, value in weights(trainer).items()}


def worker(rank: int, ranks: int, replicas: int, store: str, folder: str) -> None:
    adamw8bit.FEWEST = 256  # of a tiny model's tensors, too
    world = join(rank, ranks, store, replicas)
    here = Path(folder)
    found = moved(world) | gone_on(here, world, *EIGHT) | from_one_rank(here, world)
    if rank == 0:
        torch.save(found, here / f"found-{ranks}.pt")
    dist.barrier()
    dist.destroy_process_group()
