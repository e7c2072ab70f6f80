"""The training loop, which every loss shares, offline and online, plain and humanline.

A loss has a subclass, which overrides at most six methods: ``view_of`` (how a group becomes examples),
``check`` (what data must be), ``arrange`` (the batch as a whole), ``prepare`` (what a loss needs from all of
it), ``loss_denominator`` and ``compute_loss``. Offline and online runs differ in where ``source`` gets its
segments from, plain and humanline ones in the numbers of one ``Humanline``. The update itself does not ask
which of them runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from config.schema import Config
from data.balance import Work
from data.batches import Segment
from data.types import Example, Microbatch
from data.views import View
from models.distributed import World
from models.policy import Policy, causal_lm
from models.reference import Reference
from models.sharding import clip_grad_norm, reduced_once
from trainers.corrections import Behavior, Correction
from trainers.dealing import Dealer, DealtBatch, Progress
from trainers.humanline import Humanline
from trainers.losses.base import LossResult, Mean, TokenScores
from trainers.meters import Meters, Pending
from trainers.optimizer import lr_factor, make_optimizer, update
from trainers.routing import RouterBalance
from trainers.scorer import TokenScorer
from trainers.syncing import SyncedReference

Prepared = TypeVar("Prepared")
"""Type of the value that a trainer's ``prepare`` computes for one microbatch and hands to its
``compute_loss``."""

Observe = Callable[[DealtBatch, int, TokenScores], None]
"""Callback for every microbatch of a step: the batch, the microbatch's index in it, and its scores. It must
not make the host wait for the device."""


class SegmentSource(Protocol):
    """Source of the batches: offline it gives one segment, online one per round."""

    def segment(self, index: int) -> Segment | None:
        """Return segment ``index``, or None when the plan is finished."""
        ...


@dataclass
class StepRecord:
    """Metrics of one step, of which some values are still on their way from the device."""

    known: dict[str, Any]
    pending: Pending
    batch: list[Example]
    batch_tokens: int
    widest: int
    """Tokens of the widest microbatch on any rank."""


class Watch(Protocol):
    """Observer of a run, which evaluates, logs, saves and stops."""

    def before_step(self, segment: Segment) -> None: ...

    def observe(self, batch: DealtBatch, index: int, scores: TokenScores) -> None: ...

    def after_step(self, record: StepRecord) -> None: ...

    def done(self) -> None: ...


class BasicTrainer(ABC, Generic[Prepared]):
    """Base class of the trainers; it owns the training step.

    A subclass defines ``view`` (or ``view_of`` where settings decide), ``loss_denominator`` and
    ``compute_loss``. KTO and PPO also need a result over the whole batch first (``prepare``).
    """

    counts: ClassVar[str] = "sequences"
    """Plural name of an example: sequences or pairs."""
    rows_per_example: ClassVar[int] = 1
    online: ClassVar[bool] = True
    """Whether it can train on rounds sampled from the policy. This and what follows are literals: settings
    are checked with them before torch is imported, as the source has them (``config.schema_trainer``)."""
    feedback: ClassVar[tuple[str, ...]] = ("pair", "random", "min")
    """Values of ``rounds.feedback`` that it can learn from"""
    labelled_examples: ClassVar[bool] = False
    """Whether it reads single labelled completions (``data.frac_unique_*``)"""
    single_answers: ClassVar[bool] = True
    """Whether an answer alone, with no other of its prompt, is an example"""
    logprob_range: ClassVar[bool] = True
    """Whether ``data.logprob_range`` may order its data by the model's likelihood"""
    beta_scales_rewards: ClassVar[bool] = True
    """Whether ``loss.beta`` times the log-ratio is the reward; beta must then be above 0"""
    loss_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of ``loss`` that it reads instead of the loss function"""
    corrections: ClassVar[bool] = False
    """Whether an example's label is its advantage: of 0 it teaches nothing, and a correction can weight the
    tokens of its loss"""
    mismatched: ClassVar[bool] = False
    """Whether ``arrange`` adds mismatched rows"""
    view: View
    scorer_class: ClassVar[type[TokenScorer]] = TokenScorer

    def __init__(
        self, config: Config, policy: nn.Module, loss: Callable[..., LossResult], world: World
    ) -> None:
        self.config, self.policy, self.loss, self.world = config, policy, loss, world
        model_config = causal_lm(cast(Policy, policy).model).config
        dealt = self.arrange, self.rows_per_example, self.work_of(config, model_config)
        self.dealer = Dealer(config.model, model_config, world, *dealt)
        self.reference = SyncedReference(config, policy, self.dealer)
        self.correction = Correction.from_config(config)
        self.scorer = self.scorer_with(
            self.reference,
            Humanline.from_config(config),
            anchor=self.reference.anchor,
            ratio_to_behavior=config.ratio_reference == "behavior",
            entropy=bool(config.loss.get("entropy_bonus")),
        )
        coefficient = config.model.router_aux_loss_coef
        self.router_balance = RouterBalance(cast(Policy, policy), coefficient, world.size)
        self.optimizer = make_optimizer(policy, config)
        self.progress = Progress()

    # -- methods of a subclass -------------------------------------------------------------------------

    @abstractmethod
    def loss_denominator(self, batch: list[Example]) -> int:
        """Return the divisor of the global batch's summed loss: its number of pairs, sequences or completion
        tokens."""

    @abstractmethod
    def compute_loss(self, micro: Microbatch, scores: TokenScores, prepared: Prepared) -> LossResult:
        """Return the summed loss of a microbatch. ``prepared``: the result of ``prepare`` for it."""

    def prepare(self, batch: list[tuple[int, Microbatch]], scorer: TokenScorer) -> list[Prepared]:
        """Return, for each microbatch, what its loss needs from the whole global batch (or the whole held-out
        set).

        ``batch``: this rank's microbatches, each with the step under which the scorer's reference stores its
        scores.
        """
        return cast(list[Prepared], [None] * len(batch))

    def arrange(self, batch: list[Example]) -> list[Example]:
        """Return the global batch as the loss needs it, in its own order, before it is split."""
        return batch

    @classmethod
    def view_of(cls, config: Config) -> View:
        """Return the function that turns a group into examples with these settings."""
        return cls.view

    @classmethod
    def check(cls, config: Config, segment: Segment) -> None:
        """Raise ConfigError if the loss cannot be trained on this plan."""

    def numbers(self, micro: Microbatch) -> dict[str, Tensor]:
        """Return the columns ``data.numbers`` of the microbatch, [examples] float32 each, by name."""
        names = self.config.data.numbers or ()
        if micro.numbers is None:  # it only fills up the batch
            return dict.fromkeys(names, torch.zeros_like(micro.labels))
        return dict(zip(names, micro.numbers.unbind(1), strict=True))

    def has_signal(self, batch: list[Example]) -> bool:
        """Return whether anything can be learnt from the global batch, besides a penalty."""
        return not self.corrections or any(example.label for example in self.arrange(batch))

    # -- built once ------------------------------------------------------------------------------------

    def scorer_with(self, reference: Reference, humanline: Humanline, **more: Any) -> TokenScorer:
        """Return a scorer of this policy against ``reference``, which a loss without a reference ignores;
        ``more``: TokenScorer's other arguments."""
        used = reference if self.config.has_reference else None
        return self.scorer_class(self.policy, used, humanline, **more)

    @classmethod
    def work_of(cls, config: Config, architecture: PretrainedConfig) -> Work:
        """Return what rows cost in a step of these settings, by which they are dealt to several ranks. A
        mismatched row has no backward; with humanline the reference scores every row once more."""
        other = 1.0 if not cls.mismatched else 1 / 2 if config.humanline else 1 / 3
        return Work.of(architecture, other)

    # -- the step --------------------------------------------------------------------------------------

    def step(self, batch: DealtBatch, observe: Observe | None = None) -> StepRecord:
        """Run one optimizer update on one global batch (this rank's microbatches) and return its record."""
        at, meters, schedule = self.progress, Meters(), self.reference.schedule
        compared_with = self.reference.step
        denominator = self.loss_denominator(batch.examples)
        prepared = self.prepare([(at.step, micro) for micro in batch.microbatches], self.scorer)
        slots = list(enumerate(zip(batch.microbatches, prepared, strict=True)))
        with self.router_balance.over(batch.microbatches, meters.add) as add_share:
            for i, (micro, item) in reduced_once(self.policy, self.world, slots):
                scores = self.correction.with_weights(self.scorer.score(at.step, micro.sequences), micro)
                result = self.compute_loss(micro, scores, item)
                # Gradients are averaged over ranks but the loss is the global batch's mean, hence the factor.
                # Several ranks shard them after every microbatch: waiting would keep whole float32 gradients
                # in memory.
                total = add_share(result.total * (self.world.size / denominator), micro.sequences)
                total.backward()
                meters.add(self.metrics(batch, micro, scores, result))
                if observe is not None:
                    observe(batch, i, scores)
        norm = clip_grad_norm(self.policy.parameters(), self.config.model.max_grad_norm)
        due = schedule.due(at.step, compared_with, meters.parts.get("reference_kl", []))
        if due and not schedule.after_update:
            # After backward, before the update: the reference becomes the policy *before* this step (paper
            # C.2.1, listing line 10).
            self.reference.sync(at, at.step)
            if schedule.resets_optimizer:
                self.optimizer.state.clear()
        lr = self.config.lr * lr_factor(*batch.done, self.config)
        skip = (~torch.isfinite(norm)).float()
        update(self.optimizer, lr, skip)
        if due and schedule.after_update:
            self.reference.sync(at, at.step + 1)
        # filled on the device: a copy would make the host wait
        once = torch.full_like(norm, 1.0 / self.world.size)
        meters.add({"grad_norm": Mean(norm * once, once), "skipped": Mean(skip * once, once)})
        known = {
            "step": at.step,
            "lr": lr,
            "reference_step": compared_with if self.config.has_reference else None,
            "token_balance": batch.balance,
        }
        at.advance(batch)
        known |= {"examples": at.examples, "tokens": at.tokens}
        return StepRecord(known, meters.reduce(), batch.examples, batch.tokens, batch.widest)

    # -- metrics ---------------------------------------------------------------------------------------

    def metrics(
        self, batch: DealtBatch, micro: Microbatch, scores: TokenScores, result: LossResult
    ) -> dict[str, Mean]:
        """Return everything logged for a microbatch as sums and counts; their quotient over the global batch
        is the exact mean."""
        out = {"loss": self.mean_loss(micro, result)} | result.metrics
        if self.config.has_reference:
            out |= self.scorer.metrics(self.progress.step, micro, scores)
            out |= self.reference.metrics(micro, scores)
            out |= self.correction.metrics(scores, micro)
            if self.config.online or batch.segment.has_behavior:
                out |= Behavior.of(micro, scores.mask).metrics(scores)
        return out

    def mean_loss(self, micro: Microbatch, result: LossResult) -> Mean:
        """Return the microbatch's summed loss with its divisor; examples that only fill up the batch do not
        count."""
        real = [example for example in micro.examples if example.prompt_id]
        total = result.total.detach()
        return Mean(total, torch.full_like(total, float(self.loss_denominator(real))))

    # -- the loop --------------------------------------------------------------------------------------

    def train(self, source: SegmentSource, watch: Watch) -> None:
        """Train segment after segment until the source has no more. ``watch`` is told of every step and may
        interrupt by raising an exception."""
        while (segment := source.segment(self.progress.segment)) is not None:
            if self.config.has_reference:
                self.reference.start_segment(segment, self.progress)
            while self.progress.position < segment.steps:
                watch.before_step(segment)
                batch = self.dealer.dealt(segment, self.progress.position)
                watch.after_step(self.step(batch, watch.observe))
            self.progress.segment += 1
            self.progress.position = 0
        watch.done()

    # -- state of a run --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the loop's part of a checkpoint as JSON-compatible values; the scores of its reference are
        another (``SyncedReference.state``)."""
        return {
            "progress": asdict(self.progress),
            "reference_step": self.reference.step,
            "dealing": self.dealer.dealing,
        }

    def load_state_dict(self, state: dict[str, Any], reference_scores: dict[str, Tensor]) -> None:
        """Continue from where ``state_dict`` and ``SyncedReference.state`` were taken."""
        self.progress = Progress(**state["progress"])
        self.reference.restore(state["reference_step"], reference_scores)
