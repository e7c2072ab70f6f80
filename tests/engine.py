"""A trainer on random examples, without files: what the tests of the step, the reference and the ranks
share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from config.schema import Config
from data.batches import Segment
from data.types import Example, Microbatch
from jobs.initial_scores import initial_scores
from models.distributed import World, start
from models.policy import Policy, decoder_blocks
from models.reference import Reference
from models.sharding import local, shard
from tests.tiny import KINDS, make_config, random_groups, tiny_policy
from trainers.assembly import Offline, make_loss, trainer_class
from trainers.basic import BasicTrainer, StepRecord
from trainers.meters import Meters


@dataclass
class Log:
    """A Watch that keeps every line, and calls ``each`` before every step."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    each: Callable[[], None] = lambda: None

    def before_step(self, segment) -> None:
        self.each()

    def observe(self, batch, index, scores) -> None: ...

    def after_step(self, record: StepRecord) -> None:
        self.lines.append(record.known | record.pending.read())

    def done(self) -> None: ...


SETTINGS = ("lr=0.003", "warmup=0", "weight_decay=0.01", "model.name=tiny", "model.dtype=float32")


def engine_config(cache: Path, loss: str, *overrides: str) -> Config:
    return make_config(f"loss={loss}", *SETTINGS, f"cache_dir={cache}", *overrides)


def make_trainer(config: Config, policy: Policy | None = None, world: World | None = None) -> BasicTrainer:
    world = world or start()
    policy = policy if policy is not None else tiny_policy()
    if config.model.share_prompts:  # which no other attention can
        policy.use_packed_attention()
    again = config.model.reshard_after_forward
    shard(policy, decoder_blocks(policy.model), world, torch.float32, again)
    return trainer_class(config)(config, policy, make_loss(config), world)


def make_segment(config: Config, pairs: int, seed: int = 0, longest: int = 12) -> Segment:
    groups = random_groups(pairs, seed, KINDS[config.loss["name"]], longest)
    return Segment(groups, config.model.batch_size, sum(map(len, groups)), config.seed)


def run(
    config: Config,
    segment: Segment,
    trainer: BasicTrainer | None = None,
    each: Callable[[], None] | None = None,
) -> tuple[BasicTrainer, list[dict[str, Any]]]:
    """Train on one segment; returns the trainer and the lines of its metrics."""
    trainer = trainer or make_trainer(config)
    if trainer.reference.fixed and config.has_reference:
        batches = [segment.batch(i) for i in range(segment.steps)]
        size = config.reference_batch_size or trainer.dealer.size
        parts = {"weights": "test"}
        scores = initial_scores(trainer, batches, size, trainer.reference, parts, "score")
        trainer.reference.use_initial(scores, {})
    log = Log(each=each or (lambda: None))
    trainer.train(Offline(segment), log)
    return trainer, log.lines


def first_gradient(
    trainer: BasicTrainer, batch: list[Example], micros: list[Microbatch], reference: Reference
) -> tuple[torch.Tensor, float, dict[str, float]]:
    """(gradient, loss, metrics) of the global ``batch``, which is in these microbatches, against another
    model's scores at step 0."""
    scorer, meters, total = trainer.scorer_with(reference, trainer.scorer.humanline), Meters(), 0.0
    prepared = trainer.prepare([(0, micro) for micro in micros], scorer)
    for micro, item in zip(micros, prepared, strict=True):
        result = trainer.compute_loss(micro, scorer.score(0, micro.sequences), item)
        part = result.total / trainer.loss_denominator(batch)
        part.backward()
        total += part.item()
        meters.add(result.metrics)
    gradient = torch.cat([local(p.grad).flatten() for p in trainer.policy.parameters()])
    means = meters.reduce().read() if meters.parts else {}
    return gradient, total, {name: mean for name, mean in means.items() if mean is not None}


def weights(trainer: BasicTrainer) -> dict[str, torch.Tensor]:
    return {name: local(p.detach()).clone() for name, p in trainer.policy.named_parameters()}
