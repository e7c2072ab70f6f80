"""The one training loop. What the four variants share is everything; what the losses share is everything but three short methods.

Offline or online is where ``source`` gets its segments from; plain or humanline is the numbers of ``self.humanline``. Nothing in here
asks which.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor, nn

from common.errors import StoppedError
from config.schema import Config
from data.batches import Segment, cut, microbatch
from data.types import Example, Microbatch, Sequences
from data.views import View
from models.attention import packs_rows
from models.distributed import World, clip_grad_norm, gather_objects, reshard
from models.policy import Policy, causal_lm
from models.reference import Reference
from models.routing import RouterBalance
from trainers.humanline import Draw, Humanline
from trainers.losses.base import LossResult, Ratio, TokenScores, ratio
from trainers.meters import Meters, Pending
from trainers.optimizer import lr_factor, make_optimizer, update
from trainers.syncing import SoftReference, Syncing


class Source(Protocol):
    """Where batches come from: offline one segment, online one a round."""

    def segment(self, index: int) -> Segment | None:
        """The segment, or None when the plan is done."""
        ...


@dataclass
class Progress:
    """Where a run is: all that the loop itself must remember."""

    step: int = 0
    """The next optimizer step."""
    segment: int = 0
    position: int = 0
    """The next batch of the segment."""
    examples: int = 0
    tokens: int = 0
    skipped: int = 0
    """Steps in a row whose update was skipped for a non-finite gradient."""


@dataclass
class Record:
    """A step's line of metrics: what the host knows, and what is still on its way from the device."""

    known: dict[str, Any]
    pending: Pending
    batch: list[Example]
    batch_tokens: int


class Watch(Protocol):
    """Who follows a run: evaluates, logs, saves, stops."""

    def before_step(self) -> None: ...

    def after_step(self, record: Record) -> None: ...

    def done(self) -> None: ...


class BasicTrainer(ABC):
    """Owns the step. A subclass says how a group becomes examples (``view``), what one unit of its loss is (``units``) and how scores
    feed the loss (``compute_loss``); KTO also needs something of the whole batch first (``arrange``, ``prepare``)."""

    unit: ClassVar[str] = "sequences"
    rows_per_example: ClassVar[int] = 1
    scales_rewards: ClassVar[bool] = True
    """Whether the loss's beta multiplies log-ratios (rewards are beta * s), not something else."""
    view: View

    def __init__(
        self, config: Config, policy: nn.Module, loss: Callable[..., LossResult], world: World
    ) -> None:
        self.config, self.policy, self.loss, self.world = config, policy, loss, world
        self.humanline, self.syncing = Humanline.of(config), Syncing.of(config)
        self.soft: SoftReference | None = None
        if self.syncing.alpha < 1:
            self.soft = SoftReference(policy)
            policy.add_module("soft_reference", self.soft)
        self.balance: RouterBalance | None = None
        if config.model.router_aux_loss_coef is not None:
            self.balance = RouterBalance(cast(Policy, policy))
        self.reference = Reference(by_row=config.reference_batch_size is not None)
        self.initial: dict[str, float] = {}
        """Row key -> its completion's log-probability under the initial weights, nats (for ``drift``); rows may be missing."""
        self.engine: dict[str, float] = {}
        """The same as the engine believed it that sampled the row (for ``engine_gap``); empty where no engine did."""
        self.observe: Callable[[Microbatch, TokenScores], None] = lambda micro, scores: None
        """Told of every microbatch of a step (jobs.diagnostics). It must not make the host wait for the device."""
        self.optimizer = make_optimizer(policy, config)
        self.progress = Progress()
        self.packing, _ = packs_rows(config.model, causal_lm(cast(Policy, policy).model).config)
        self.micro_size = config.model.batch_size // (config.model.gradient_accumulation_steps * world.size)

    # -- what a subclass supplies ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def units(self, batch: list[Example]) -> int:
        """The number that the summed loss of the global batch is divided by."""

    @abstractmethod
    def compute_loss(self, micro: Microbatch, scores: TokenScores) -> LossResult:
        """The loss of a microbatch, summed over its units."""

    def arrange(self, batch: list[Example]) -> list[Example]:
        """A last look at the global batch in its own order, before it is cut."""
        return batch

    @classmethod
    def check(cls, config: Config, segment: Segment) -> None:
        """Raise ConfigError if the loss cannot be trained on this plan."""

    def prepare(
        self, batch: list[tuple[int, Microbatch]], reference: Reference, humanline: Humanline
    ) -> None:
        """What needs the whole global batch (or the whole held-out set) before the first microbatch's loss.
        ``batch``: this rank's microbatches of it, each with the step under which ``reference`` has its
        scores."""

    def after_backward(self, metrics: list[dict[str, Ratio]]) -> None:
        """Called with the loss's metrics of each microbatch: what the objective carries to the next step (BCO's running means)."""

    # -- scores ---------------------------------------------------------------------------------------------------------------------

    @property
    def reward_scale(self) -> float:
        """What a sequence's log-ratio is multiplied with to be its reward: the loss's beta, where that is what beta does."""
        scaled = self.scales_rewards and self.config.has_reference
        return float(self.config.loss.get("beta", 1.0)) if scaled else 1.0

    def microbatches(self, batch: list[Example], size: int | None = None) -> list[Microbatch]:
        """This rank's share of a global batch, on the device."""
        return self.share(self.arrange(batch), size or self.micro_size)

    def share(self, arranged: list[Example], size: int) -> list[Microbatch]:
        """This rank's share of examples that ``arrange`` has seen, in microbatches of at most ``size``, on
        the device."""
        parts = cut(arranged, self.world.rank, self.world.size, size, self.rows_per_example)
        return [microbatch(part, self.world.device, self.packing) for part in parts]

    def logprobs(self, micro: Microbatch) -> Tensor:
        """[R, T] the policy's token log-probabilities, nats, with gradient."""
        return self.policy(micro.sequences)

    def score(self, step: int, micro: Microbatch, reference: Reference, humanline: Humanline) -> TokenScores:
        """Policy (with gradient) and reference log-probabilities of a microbatch, and their clipped difference."""
        policy = self.logprobs(micro)
        other = reference.lookup(step, micro.sequences) if self.config.has_reference else policy.detach()
        return humanline.scores(policy, other, micro.sequences.mask, draw(step, micro.sequences))

    def upcoming(self, segment: Segment, position: int, step: int) -> Iterator[tuple[int, list[Microbatch]]]:
        """(step, microbatches) of the batches from ``position`` on that see the same reference as step ``step``: up to the next sync,
        or the segment's end."""
        last = self.syncing.last_step_before_sync(step)
        while position < segment.steps and step <= last:
            yield step, self.microbatches(segment.batch(position))
            position, step = position + 1, step + 1

    # -- the step -------------------------------------------------------------------------------------------------------------------

    def step(self, segment: Segment) -> Record:
        """One optimizer update on one global batch (this rank's microbatches)."""
        at = self.progress
        batch = segment.batch(at.position)
        micros = self.microbatches(batch)
        units, meters, of_loss = self.units(batch), Meters(), []
        reference_step = self.reference.step
        self.prepare([(at.step, micro) for micro in micros], self.reference, self.humanline)
        if self.balance is not None:
            self.balance.begin([micro.sequences for micro in micros])
        for micro in micros:
            with nullcontext() if self.balance is None else self.balance.watched():
                scores = self.score(at.step, micro, self.reference, self.humanline)
            result = self.compute_loss(micro, scores)
            # The ranks' gradients are averaged; the loss is the global batch's mean. Reduced each time: holding it back keeps whole
            # float32 gradients.
            total = result.total * (self.world.size / units)
            if self.balance is not None:
                total = total + self.routers_share(self.balance.part(micro.sequences), len(micros), meters)
            total.backward()
            meters.add(self.metrics(micro, scores, result))
            self.observe(micro, scores)
            of_loss.append(result.metrics)
        self.after_backward(of_loss)
        norm = clip_grad_norm(self.policy.parameters(), self.config.model.max_grad_norm)
        due = self.syncing.due(at.step)
        if due and not self.syncing.after_update:
            # After backward, before the update: the reference becomes the policy *before* this step (paper C.2.1, listing line 10).
            self.sync(segment, at.step)
        lr = self.config.lr * lr_factor(segment.progress(at.position), self.config)
        skip = (~torch.isfinite(norm)).float()
        update(self.optimizer, lr, skip)
        if due and self.syncing.after_update:
            self.sync(segment, at.step + 1)
        once = torch.full_like(norm, 1.0 / self.world.size)  # filled there: a copy would make the host wait
        meters.add({"grad_norm": Ratio(norm * once, once), "skipped": Ratio(skip * once, once)})
        known = {
            "step": at.step,
            "lr": lr,
            "reference_step": reference_step if self.config.has_reference else None,
        }
        return self._advance(batch, Record(known, meters.reduce(), batch, token_count(batch)))

    def sync(self, segment: Segment, policy_step: int) -> None:
        """Move the reference to the policy as it is now, that of ``policy_step``, and score what will be compared with it."""
        at = self.progress
        upcoming = self.upcoming(segment, at.position + 1, at.step + 1)
        if self.soft is None:
            self.reference.refresh(self.policy, policy_step, upcoming)
            return
        self.soft.follow(self.policy, self.syncing.alpha)
        with self.soft.in_place_of(self.policy):
            self.reference.refresh(self.policy, policy_step, upcoming)

    def _advance(self, batch: list[Example], record: Record) -> Record:
        at = self.progress
        at.step, at.position = at.step + 1, at.position + 1
        at.examples, at.tokens = at.examples + len(batch), at.tokens + token_count(batch)
        record.known.update(examples=at.examples, tokens=at.tokens)
        return record

    def routers_share(self, part: Tensor, microbatches: int, meters: Meters) -> Tensor:
        """[] what is added to a microbatch's loss for its ``part`` of the routers' auxiliary loss, which is
        logged."""
        share = torch.full_like(part.detach(), 1.0 / (microbatches * self.world.size))
        meters.add({"router_aux_loss": Ratio(part.detach(), share)})
        return part * (self.world.size * cast(float, self.config.model.router_aux_loss_coef))

    def metrics(self, micro: Microbatch, scores: TokenScores, result: LossResult) -> dict[str, Ratio]:
        """Everything logged of a microbatch, as sums and counts: their quotient over the global batch is the exact mean."""
        out = {"loss": self.loss_ratio(micro, result)} | result.metrics
        if self.config.has_reference:
            out |= self.humanline.metrics(scores, draw(self.progress.step, micro.sequences))
            out["drift"] = self._moved(micro, scores, self.initial)
            if self.config.online:
                out["engine_gap"] = self._moved(micro, scores, self.engine)
        return out

    def loss_ratio(self, micro: Microbatch, result: LossResult) -> Ratio:
        """The microbatch's summed loss over its units; rows that fill a batch up are none."""
        real = [example for example in micro.examples if example.prompt_id]
        return Ratio(result.total.detach(), torch.full_like(result.total.detach(), float(self.units(real))))

    def moved(self, micro: Microbatch, scores: TokenScores, since: dict[str, float]) -> tuple[Tensor, Tensor]:
        """([R] how much each row's log-probability has changed against ``since`` (row key -> nats), nats; [R] bool: is it known)."""
        before = torch.tensor(
            [since.get(row.key, math.nan) for row in micro.sequences.rows], dtype=torch.float32
        )
        before = before.to(scores.mask.device, non_blocking=True)
        known = ~before.isnan() & scores.valid
        return torch.where(scores.mask, scores.policy.detach(), 0.0).sum(dim=-1) - before, known

    def _moved(self, micro: Microbatch, scores: TokenScores, since: dict[str, float]) -> Ratio:
        """The mean token log-ratio of the policy against ``since``, over the rows that it knows."""
        moved, known = self.moved(micro, scores, since)
        return Ratio(ratio(moved, known).sum, torch.where(known, scores.mask.sum(dim=-1), 0).sum())

    # -- the loop -------------------------------------------------------------------------------------------------------------------

    def train(self, source: Source, watch: Watch) -> None:
        """Train segment after segment until the source has no more. ``watch`` is told of every step and may interrupt by raising."""
        while (segment := source.segment(self.progress.segment)) is not None:
            if self.progress.position == 0 and self.config.has_reference and not self.fixed_reference:
                if self.soft is not None:
                    self.soft.follow(self.policy, alpha=1.0)
                self.reference.refresh(
                    self.policy, self.progress.step, self.upcoming(segment, 0, self.progress.step)
                )
            while self.progress.position < segment.steps:
                watch.before_step()
                if self.progress.step == 0 and self.config.has_reference:
                    self.gate(segment)
                watch.after_step(self.step(segment))
            self.progress.segment, self.progress.position = self.progress.segment + 1, 0
        watch.done()

    @property
    def fixed_reference(self) -> bool:
        """Whether the reference is the initial weights for ever (offline without syncing): scored once, before training."""
        return not self.config.online and self.config.syncing == "never"

    @torch.no_grad()
    def gate(self, segment: Segment) -> None:
        """At step 0 policy and reference are the same weights: stop if their log-probabilities differ by more
        than rounding, or are no numbers. Raises StoppedError, on every rank."""
        micro = self.microbatches(segment.batch(0))[0]
        scores = self.score(0, micro, self.reference, Humanline())
        reshard(self.policy)
        policy, reference = (torch.where(scores.mask, x, 0.0) for x in (scores.policy, scores.reference))
        mine = (bool(policy.isfinite().all()), float((policy - reference).abs().nan_to_num(math.inf).max()))
        found = gather_objects(mine)
        if not all(finite for finite, _ in found):
            dtype, kernel = self.config.model.dtype, self.config.model.attn_implementation
            raise StoppedError(
                "the model's log-probabilities of the first batch are not finite (NaN or infinity) before "
                f"step 0, though its weights are: its forward overflows with model.dtype={dtype} and "
                f"model.attn_implementation={kernel}; try others, or another model"
            )
        worst, limit = max(worst for _, worst in found), 1e-3 if self.config.model.dtype == "float32" else 0.1
        if worst > limit:
            raise StoppedError(
                f"policy and reference are the same weights before step 0, yet a token's log-probability differs by {worst:.3g} nats "
                f"(limit {limit}): a stale score cache, or an attention kernel that depends on the batch. Delete {self.config.cache_dir} "
                "and try again, or try another model.attn_implementation"
            )


def draw(step: int, sequences: Sequences) -> Draw:
    """What a random rejection of these rows' tokens depends on."""
    return Draw(step, [row.key for row in sequences.rows])


def token_count(batch: list[Example]) -> int:
    """Tokens of the batch's rows, prompts included."""
    return sum(len(row) for example in batch for row in example.rows)
