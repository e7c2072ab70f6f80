"""What every rank does where a LoRA policy in shards has noise on its adapters for a while."""

from __future__ import annotations

from pathlib import Path

import torch

from models.adapters import adapter_state, export_adapters, perturbed
from models.distributed import local, shard
from models.policy import decoder_blocks
from models.pretrained import load_policy
from models.reference import score
from tests.distributed.joining import join
from tests.unit.models.test_lora import model_of
from tests.unit.models.test_policy import CPU, batch


def noisy(rank: int, ranks: int, store: str, folder: str) -> None:
    """Rank 0 writes the adapters with noise on them to ``adapters``, and what the ranks together made of them
    to ``scores.pt``. ``folder`` has the model."""
    config = model_of(Path(folder) / f"base-{rank}")  # of several ranks the first alone would write it
    world = join(rank, ranks, store)
    policy = load_policy(config, CPU)
    # whole weights stay whole after a forward, which is the harder case
    shard(policy, decoder_blocks(policy.model), world, torch.float32, False)
    rows = batch()
    plain = score(policy, rows)
    before = {name: local(p.detach()).clone() for name, p in policy.named_parameters()}
    with perturbed(policy):
        scores, state = score(policy, rows), adapter_state(policy)
    assert not torch.equal(scores, plain)
    assert torch.equal(score(policy, rows), plain), "and no trace is left of it"
    assert all(torch.equal(local(p.detach()), before[name]) for name, p in policy.named_parameters())
    if rank == 0:
        export_adapters(state, policy, Path(folder) / "base-0", Path(folder) / "adapters", torch.float32)
        torch.save(scores, Path(folder) / "scores.pt")
    torch.distributed.destroy_process_group()
