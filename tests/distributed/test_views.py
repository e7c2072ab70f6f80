"""Tied weights in uneven shards, trained for several steps from files: the forward, the export, a resumed
run, a slow reference and an engine have one and the same model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from data.batches import Segment, collate
from data.types import Sequences
from models.checkpoint import Checkpoints
from models.distributed import World, gather_objects
from models.export import export, full_state, whole_weights
from models.loading import load_sharded
from models.policy import Policy, causal_lm, decoder_blocks, output_head
from models.pretrained import empty_policy, load_tokenizer
from models.reference import score
from models.sharding import local, rounded, shard, to_empty, unlike_gathered
from tests.distributed.joining import in_world
from tests.engine import engine_config, run
from tests.tiny import random_groups, tiny_llama
from tests.unit.models.test_policy import tokenizer
from trainers.assembly import make_loss, trainer_class
from trainers.basic import BasicTrainer


def train(world: World, folder: Path, *overrides: str) -> None:
    """Train three steps from the files of ``folder``/model and compare every view with a plain model."""
    ranks = world.size
    sizes = ("model.max_length=64", "model.max_prompt_length=16", f"model.batch_size={2 * ranks}")
    words = (f"model.name_or_path={folder}/model", *sizes, "humanline=true", *overrides)
    config = engine_config(folder / "cache", "dpo", *words)

    def loaded() -> BasicTrainer:
        policy, _ = load_sharded(config.model, world)
        return trainer_class(config)(config, policy, make_loss(config), world)

    trainer, groups = loaded(), random_groups(6 * ranks)
    rows = collate([row for (example,) in groups[:4] for row in example.rows], world.device)
    kept = Checkpoints(folder / "checkpoints", world, 1)
    start = full_state(trainer.policy)

    def check(of: BasicTrainer = trainer) -> None:
        assert unlike_gathered(of.policy) == []
        compare(of.policy, rows, world)
        if of.reference.soft is not None:
            with of.reference.soft.in_place_of(of.policy):
                compare(of.policy, rows, world)

    def each() -> None:
        check()
        if trainer.progress.step == 2:
            kept.save(2, trainer.policy, trainer.optimizer, {}, {})
            with rounded(trainer.policy, torch.bfloat16):
                compare(trainer.policy, rows, world)
            check()

    run(config, Segment(groups, 2 * ranks, len(groups), seed=0), trainer, each)
    check()
    state = full_state(trainer.policy)
    if world.is_main:
        assert all(not torch.equal(state[name], start[name]) for name in state if "proj" in name)
        assert config.model.use_peft or not torch.equal(state[EMBEDDING], start[EMBEDDING])
        export(state, trainer.policy, load_tokenizer(config.model), folder / "out", torch.float32)
        exported = AutoModelForCausalLM.from_pretrained(folder / "out").state_dict()
        assert all(torch.equal(exported[name], state[name]) for name in state)
    resumed = loaded()
    kept.load(kept.path(2), resumed.policy, resumed.optimizer)
    check(resumed)
    dist.barrier()


EMBEDDING = "model.embed_tokens.weight"


def compare(policy: Policy, rows: Sequences, world: World) -> None:
    """Compare the policy's log-probabilities with those of a plain transformers model that has its gathered
    weights, and these with what an engine is handed."""
    found, state = score(policy, rows), full_state(policy)
    handed = {name: local(tensor).clone() for name, tensor in whole_weights(policy, torch.float32)}
    if not world.is_main:
        return
    plain = LlamaForCausalLM(causal_lm(policy.model).config)
    plain.load_state_dict(state)
    logits = plain(input_ids=rows.input_ids).logits.flatten(0, 1)[rows.predict]
    wanted = logits.log_softmax(-1).gather(-1, rows.targets[:, None])[:, 0]
    assert torch.allclose(found.flatten()[rows.cells], wanted, rtol=1e-6, atol=1e-6)
    assert handed.keys() == state.keys() and all(torch.equal(handed[name], state[name]) for name in state)


def tie_late(world: World, folder: Path) -> None:
    """Tie the weights of two parameters after they are sharded, where FSDP2 pads each to a copy of its own;
    then move what the state dict holds."""
    config = engine_config(folder, "dpo", f"model.name_or_path={folder}/model").model
    policy = empty_policy(config, untied=True)
    shard(policy, decoder_blocks(policy), world, torch.float32)
    to_empty(policy, world.device)
    head, embedding = output_head(policy.model), causal_lm(policy.model).get_input_embeddings()
    head.weight = embedding.weight
    for parameter in policy.parameters():
        torch.nn.init.constant_(parameter, 0.5)
    rows = collate([row for (example,) in random_groups(4) for row in example.rows], world.device)
    score(policy, rows)
    assert unlike_gathered(policy) == []
    with torch.no_grad():
        head.weight.add_(1.0)
    # rank 0's part is as long as the padded one, and not copied
    assert gather_objects(unlike_gathered(policy)) == [[], [f"model.{EMBEDDING}"]]


def model_in(folder: Path) -> Path:
    tiny_llama(tied=True).save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    return folder


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (2, ['model.new_tokens=["a","b"]']),
        (3, ["sync_mode=ema", "sync_alpha=0.5"]),
        (3, ["model.use_peft=true", "model.peft.lora_r=4"]),
    ],
    ids=["new tokens on 2", "slow reference on 3", "LoRA on 3"],
)
def test_every_view_of_tied_weights_is_the_model_that_is_trained(tmp_path, ranks, overrides):
    in_world(train, ranks, model_in(tmp_path), *overrides)


def test_a_weight_that_the_forward_gathers_from_elsewhere_is_named(tmp_path):
    in_world(tie_late, 2, model_in(tmp_path))
