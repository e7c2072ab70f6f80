"""What every rank runs: updates of matrices of all shapes, and of a model that goes on from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from models.checkpoint import Checkpoints
from models.distributed import World, local
from optimizers.build import update
from optimizers.muon import MuonWithAdamW
from tests.distributed.joining import join
from tests.engine import engine_config, make_trainer, weights
from tests.tiny import tiny_policy
from trainers.basic import BasicTrainer

SHAPES = ((1, 3), (5, 7), (9, 4), (2, 6, 3), (12, 8), (8, 12), (3, 2))
"""Fewer rows than ranks, rows that do not divide, experts."""
NO = torch.tensor(0.0)


def sharded(whole: Tensor, world: World) -> Tensor:
    """As FSDP2 has it: by rows, whole in every replica."""
    placements = (Replicate(),) * (world.mesh.ndim - 1) + (Shard(0),)
    return distribute_tensor(whole, world.mesh, placements)


def moved_matrices(world: World) -> dict[str, Tensor]:
    """Matrices after three updates."""
    torch.manual_seed(0)
    params = [nn.Parameter(sharded(torch.randn(shape), world)) for shape in SHAPES]
    optimizer = MuonWithAdamW(
        params, None, lr_ratio=2.0, weight_decay=0.3, momentum=0.7, adjust_lr="match_rms_adamw"
    )
    for _ in range(3):
        for p in params:
            p.grad = sharded(torch.randn(p.shape), world)
        update(optimizer, 0.03, NO)
    return {str(shape): local(p.detach()) for shape, p in zip(SHAPES, params, strict=True)}


def push(trainer: BasicTrainer, seed: int) -> None:
    """One update by gradients that every rank makes alike."""
    torch.manual_seed(seed)
    for p in trainer.policy.parameters():
        p.grad = sharded(torch.randn(p.shape), trainer.world)
    update(trainer.optimizer, 0.01, NO)


def gone_on(folder: Path, world: World, *overrides: str) -> dict[str, Tensor]:
    """The weights after three updates, the last of them by a trainer that began with a checkpoint: those of
    one that did not, to the bit."""
    config = engine_config(folder / "cache", "dpo", *overrides)
    trainer = make_trainer(config, tiny_policy(tied=False), world)
    kept = Checkpoints(folder / f"checkpoints-{world.size}", world, 1)
    push(trainer, 1)
    push(trainer, 2)
    kept.save(2, trainer.policy, trainer.optimizer, {}, {})
    other = make_trainer(config, tiny_policy(seed=9, tied=False), world)
    kept.load(kept.path(2), other.policy, other.optimizer)
    for each in (trainer, other):
        push(each, 3)
    found, wanted = weights(other), weights(trainer)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    return wanted


def worker(rank: int, ranks: int, replicas: int, store: str, folder: str) -> None:
    found = results(Path(folder), join(rank, ranks, store, replicas))
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")
    dist.barrier()
    dist.destroy_process_group()


def results(folder: Path, world: World) -> dict[str, Tensor]:
    """Weights by name."""
    return moved_matrices(world) | gone_on(
        folder, world, "optimizer=Muon", "muon.lr=0.02", "weight_decay=0.1"
    )
