"""A base in 4 bits under LoRA is the same on however many ranks, and goes on from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from config.schema import Config
from data.batches import collate
from models.checkpoint import Checkpoints
from models.distributed import World
from models.export import full_state, whole_weights
from models.fingerprint import weights_fingerprint
from models.loading import load_sharded
from models.pretrained import load_policy
from models.quantization import quantised
from models.reference import score
from models.sharding import local
from tests.distributed.joining import in_world
from tests.engine import engine_config, make_segment, run, weights
from tests.tiny import random_groups, tiny_llama
from trainers.assembly import make_loss, trainer_class
from trainers.basic import BasicTrainer

NF4 = ("model.use_peft=true", "model.peft.lora_r=4", "model.quantization=nf4", "model.max_length=64")


def settings(folder: Path, world: World) -> Config:
    path = folder / "base"
    if world.is_main and not path.exists():
        tiny_llama(seed=1, tied=False).save_pretrained(path)
    dist.barrier()
    places = (f"model.name_or_path={path}", "model.max_prompt_length=32", "model.batch_size=8")
    return engine_config(folder / "cache", "dpo", *NF4, *places, "humanline=true", "sync_freq=2")


def fresh(config: Config, world: World) -> BasicTrainer:
    policy, _ = load_sharded(config.model, world)
    return trainer_class(config)(config, policy, make_loss(config), world)


def loaded(config: Config, world: World) -> None:
    """The sharded model is the whole one: its bytes, its fingerprint, its scores, what it would export."""
    policy, fingerprint = load_sharded(config.model, world)
    whole = load_policy(config.model, torch.device("cpu"))
    assert fingerprint == weights_fingerprint(whole.named_parameters())
    found, expected = dict(policy.named_parameters()), dict(whole.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(local(p.detach()), expected[name].detach()) for name, p in found.items())
    assert len(quantised(policy.model)) == 14
    sequences = collate([row for (e,) in random_groups(4) for row in e.rows], world.device)
    assert torch.equal(score(policy, sequences), score(whole, sequences))
    state = full_state(policy)
    if world.is_main:
        wanted = dict(whole_weights(whole, torch.float32))
        assert state.keys() == wanted.keys() and all(torch.equal(state[n], wanted[n]) for n in wanted)
    each = dict(whole_weights(policy, torch.float32))
    assert all(torch.equal(each[n].float(), v) for n, v in state.items())


def trained(folder: Path, config: Config, world: World) -> dict[str, Tensor]:
    """The trained weights after 4 steps, the last two also by a trainer that began with a checkpoint."""
    segment = make_segment(config, pairs=32)
    trainer = fresh(config, world)
    begin = weights(trainer)
    _, lines = run(config, segment, trainer)
    assert len(lines) == segment.steps == 4
    assert abs(lines[0]["loss"] - 0.6931472) < 1e-6  # the policy is its own reference
    found = weights(trainer)
    moved = {name for name in found if not torch.equal(found[name], begin[name])}
    assert moved and all("lora_" in name for name in moved)
    kept = Checkpoints(folder / f"checkpoints-{world.size}", world, 1)
    kept.save(4, trainer.policy, trainer.optimizer, {}, {})
    other = fresh(config, world)
    kept.load(kept.path(4), other.policy, other.optimizer)
    again = weights(other)
    assert all(torch.equal(again[name], found[name]) for name in found)
    one = folder / "checkpoints-1"
    if world.size > 1 and one.is_dir():  # what one rank wrote
        kept = Checkpoints(one, world, 1)
        kept.load(kept.path(4), other.policy, other.optimizer)
    return found | {f"from one rank, {name}": value for name, value in weights(other).items()}


def worker(world: World, folder: Path) -> None:
    config = settings(folder, world)
    loaded(config, world)
    found = trained(folder, config, world)
    if world.is_main:
        torch.save(found, folder / f"found-{world.size}.pt")
    dist.barrier()


def test_ranks_change_nothing_in_4_bits(tmp_path):
    """The bytes to the bit; what is trained on them but for rounding, as without."""
    found = {}
    for ranks in (1, 3):
        in_world(worker, ranks, tmp_path)
        found[ranks] = torch.load(tmp_path / f"found-{ranks}.pt")
    assert any(value.dtype == torch.uint8 for value in found[1].values())
    assert set(found[3]) == set(found[1])
    for name, value in found[1].items():
        same = value.dtype == torch.uint8 or name.startswith("from one rank, ")
        torch.testing.assert_close(
            found[3][name], value, rtol=0, atol=0 if same else 2e-4, msg=lambda m, n=name: f"{n}: {m}"
        )
