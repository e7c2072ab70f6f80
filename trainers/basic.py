"""The training loop, which every loss shares, offline and online, plain and humanline.

Losses differ in six methods of a subclass: ``view_of`` (how a group becomes examples), ``check`` (what data
must be), ``arrange`` (the batch as a whole), ``prepare`` (what a loss needs from all of it),
``loss_denominator`` and ``compute_loss``. Offline and online runs differ in where ``source`` gets its
segments from, plain and humanline ones in the numbers of one ``Humanline``. The update itself does not ask
which of them runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from common.progress import interruptible
from config.schema import Config
from data.balance import Work, token_balance
from data.batches import Segment, Size, deal, dealing, microbatch, size_of, token_count
from data.types import Example, Microbatch
from data.views import View
from models.attention import all_pack_rows, shares_prompts
from models.distributed import World, gather_objects
from models.policy import Policy, causal_lm
from models.reference import Reference, Scored
from models.sharding import clip_grad_norm, reduced_once
from models.soft_reference import SoftReference
from trainers.corrections import Behavior, Correction
from trainers.drift import mean_log_ratio, reference_kl
from trainers.humanline import Humanline
from trainers.losses.base import LossResult, Mean, TokenScores
from trainers.meters import Meters, Pending
from trainers.optimizer import lr_factor, make_optimizer, update
from trainers.routing import Add, RouterBalance
from trainers.scorer import TokenScorer, rejection_key
from trainers.syncing import Syncing

Prepared = TypeVar("Prepared")
"""Type of the value that a trainer's ``prepare`` computes for one microbatch and hands to its
``compute_loss``."""

ANCHOR = "anchor/"
"""Prefix by which a checkpoint tells the scores of a KL term's anchor from the reference's."""

Observe = Callable[[Microbatch, TokenScores], None]
"""Callback for every microbatch of a step. It must not make the host wait for the device."""


class SegmentSource(Protocol):
    """Source of the batches: offline it gives one segment, online one per round."""

    def segment(self, index: int) -> Segment | None:
        """Return segment ``index``, or None when the plan is finished."""
        ...


@dataclass
class Progress:
    """Position of a run in its plan: everything that the loop itself must remember."""

    step: int = 0
    """Index of the next optimizer step."""
    segment: int = 0
    position: int = 0
    """Index of the segment's next batch."""
    examples: int = 0
    tokens: int = 0
    skipped: int = 0
    """Number of steps in a row whose update was skipped for a non-finite gradient."""
    skipped_steps: int = 0
    """Number of all steps whose update was skipped."""
    silent_steps: int = 0
    """Number of the other steps that had no signal (``BasicTrainer.has_signal``) or no gradient."""


@dataclass(frozen=True)
class DealtBatch:
    """The global batch of a step, dealt to the ranks."""

    segment: Segment
    examples: list[Example]
    microbatches: list[Microbatch]
    """Those of this rank, on the device."""
    done: tuple[float, float]
    """The share of the whole plan before and after the step, in [0, 1]."""
    tokens: int
    balance: float
    """How evenly the tokens lie on the ranks: 1 where no rank waits."""
    has_behavior: bool
    """Whether the segment knows the log-probabilities of a policy that wrote a token."""


@dataclass
class StepRecord:
    """Metrics of one step, of which some values are still on their way from the device."""

    known: dict[str, Any]
    pending: Pending
    batch: list[Example]
    batch_tokens: int


class Watch(Protocol):
    """Observer of a run, which evaluates, logs, saves and stops."""

    def before_step(self, segment: Segment) -> None: ...

    def before_first_step(self, segment: Segment) -> None:
        """Called before step 0 if the loss has a reference; the reference's scores exist by then."""

    def observe(self, micro: Microbatch, scores: TokenScores) -> None: ...

    def after_step(self, record: StepRecord) -> None: ...

    def done(self) -> None: ...


class BasicTrainer(ABC, Generic[Prepared]):
    """Base class of the trainers; it owns the training step.

    A subclass defines ``view`` (or ``view_of`` where settings decide), ``loss_denominator`` and
    ``compute_loss``. KTO and PPO also need a result over the whole batch first (``arrange``, ``prepare``).
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
    """Whether a correction can weight the tokens of its loss"""
    advantages: ClassVar[bool] = False
    """Whether an example's label is its advantage, of which 0 teaches nothing"""
    mismatched: ClassVar[bool] = False
    """Whether ``arrange`` adds mismatched rows"""
    view: View
    scorer_class: ClassVar[type[TokenScorer]] = TokenScorer

    def __init__(
        self, config: Config, policy: nn.Module, loss: Callable[..., LossResult], world: World
    ) -> None:
        self.config = config
        self.policy = policy
        self.loss = loss
        self.world = world
        self.syncing = Syncing.from_config(config)
        held = self.syncing.alpha < 1 or config.keeps_reference
        self.soft = SoftReference.part_of(policy) if held else None
        self.balance: RouterBalance | None = None
        if (coefficient := config.model.router_aux_loss_coef) is not None:
            self.balance = RouterBalance(cast(Policy, policy), coefficient, world.size)
        # Not a part of the policy: a run that resumes loads the initial weights before its checkpoint.
        anchored = config.loss.get("kl_anchor") == "initial" and not config.stays_initial
        self.initial = SoftReference(policy) if anchored and config.online else None
        by_row = config.reference_batch_size is not None and self.syncing.delay is None
        self.reference = Reference(by_row)
        self.anchor = Reference(self.reference.by_row) if anchored else None
        self.correction = Correction.from_config(config)
        self.scorer = self.scorer_with(
            self.reference,
            Humanline.from_config(config),
            anchor=self.anchor,
            ratio_to_behavior=config.ratio_reference == "behavior",
            entropy=bool(config.loss.get("entropy_bonus")),
        )
        self.initial_logprobs: Mapping[str, Tensor] = {}
        """Row key -> [C] log-probabilities under the initial weights, nats (for ``drift``); rows may be
        missing."""
        self.optimizer = make_optimizer(policy, config)
        self.progress = Progress()
        model_config = causal_lm(cast(Policy, policy).model).config
        # All ranks must deal rows alike.
        self.packing = all_pack_rows(config.model, model_config, gather_objects)
        self.shares_prompts = all(gather_objects(shares_prompts(config.model, model_config, self.packing)))
        self.work = self.work_of(config, model_config)
        self.micro_size = size_of(config.model, world.size)
        self.microbatches_of_step = 0

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
        return not self.advantages or any(example.label for example in self.arrange(batch))

    # -- scores ----------------------------------------------------------------------------------------

    def scorer_with(self, reference: Reference, humanline: Humanline, **more: Any) -> TokenScorer:
        """Return a scorer of this policy against ``reference``, which a loss without a reference ignores;
        ``more``: TokenScorer's other arguments."""
        used = reference if self.config.has_reference else None
        return self.scorer_class(self.policy, used, humanline, **more)

    # -- microbatches ----------------------------------------------------------------------------------

    def dealt(self, segment: Segment) -> DealtBatch:
        """Return the segment's next batch, dealt to the ranks."""
        position = self.progress.position
        batch = segment.batch(position)
        slots = self.deal(self.arrange(batch), self.micro_size)
        return DealtBatch(
            segment,
            batch,
            self.mine(slots),
            (segment.done(position), segment.done(position + 1)),
            token_count(batch),
            token_balance(slots, self.packing, self.shares_prompts),
            segment.has_behavior,
        )

    def microbatches(self, batch: list[Example], size: Size | None = None) -> list[Microbatch]:
        """Return this rank's share of a global batch in microbatches, on the device."""
        return self.share(self.arrange(batch), size or self.micro_size)

    def share(self, arranged: list[Example], size: Size) -> list[Microbatch]:
        """Return this rank's share of ``arranged``, the output of ``arrange``, in microbatches of at most
        ``size``, on the device."""
        return self.mine(self.deal(arranged, size))

    def deal(self, arranged: list[Example], size: Size) -> list[list[list[Example]]]:
        """Deal ``arranged``, the output of ``arrange``, to the ranks: [slot][rank] lists of examples."""
        joined = self.packing, self.shares_prompts
        return deal(arranged, self.world.size, size, self.rows_per_example, *joined, self.work)

    def mine(self, slots: list[list[list[Example]]]) -> list[Microbatch]:
        """Return this rank's microbatches of the dealt ``slots``, on the device."""
        rank, device = self.world.rank, self.world.device
        return [microbatch(slot[rank], device, self.packing, self.shares_prompts) for slot in slots]

    @classmethod
    def work_of(cls, config: Config, architecture: PretrainedConfig) -> Work:
        """Return what rows cost in a step of these settings, by which they are dealt to several ranks. A
        mismatched row has no backward; with humanline the reference scores every row once more."""
        other = 1.0 if not cls.mismatched else 1 / 2 if config.humanline else 1 / 3
        return Work.of(architecture, other)

    def upcoming(
        self, segment: Segment, position: int, step: int, since: int | None = None
    ) -> Iterator[tuple[int, list[Microbatch]]]:
        """Yield (step, microbatches) of the batches from ``position`` on that use the same reference as step
        ``step``: up to the next sync or the segment's end. ``since``: the step whose policy the reference is;
        None: ``step``."""
        last = self.syncing.last_step_before_sync(step, step if since is None else since)
        while position < segment.steps and step <= last:
            yield step, self.microbatches(segment.batch(position))
            position += 1
            step += 1

    # -- the step --------------------------------------------------------------------------------------

    def step(self, batch: DealtBatch, observe: Observe | None = None) -> StepRecord:
        """Run one optimizer update on one global batch (this rank's microbatches) and return its record."""
        at, meters, compared_with = self.progress, Meters(), self.reference.step
        micros, segment = batch.microbatches, batch.segment
        self.microbatches_of_step = len(micros)
        denominator = self.loss_denominator(batch.examples)
        prepared = self.prepare([(at.step, micro) for micro in micros], self.scorer)
        slots = list(zip(micros, prepared, strict=True))
        with self.with_auxiliary(micros, meters) as add_share:
            for micro, item in reduced_once(self.policy, self.world, slots):
                scores = self.correction.with_weights(self.scorer.score(at.step, micro.sequences), micro)
                result = self.compute_loss(micro, scores, item)
                # Gradients are averaged over ranks but the loss is the global batch's mean, hence the factor.
                # Several ranks shard them after every microbatch: waiting would keep whole float32 gradients
                # in memory.
                total = add_share(result.total * (self.world.size / denominator), micro.sequences)
                total.backward()
                meters.add(self.metrics(batch.has_behavior, micro, scores, result))
                if observe is not None:
                    observe(micro, scores)
        norm = clip_grad_norm(self.policy.parameters(), self.config.model.max_grad_norm)
        due = self.syncing.due(at.step, compared_with, meters.parts.get("reference_kl", []))
        if due and not self.syncing.after_update:
            # After backward, before the update: the reference becomes the policy *before* this step (paper
            # C.2.1, listing line 10).
            self.sync(segment, at.step)
            if self.syncing.resets_optimizer:
                self.optimizer.state.clear()
        lr = self.config.lr * lr_factor(*batch.done, self.config)
        skip = (~torch.isfinite(norm)).float()
        update(self.optimizer, lr, skip)
        if due and self.syncing.after_update:
            self.sync(segment, at.step + 1)
        # filled on the device: a copy would make the host wait
        once = torch.full_like(norm, 1.0 / self.world.size)
        meters.add({"grad_norm": Mean(norm * once, once), "skipped": Mean(skip * once, once)})
        known = {
            "step": at.step,
            "lr": lr,
            "reference_step": compared_with if self.config.has_reference else None,
            "token_balance": batch.balance,
        }
        return self._advance(StepRecord(known, meters.reduce(), batch.examples, batch.tokens))

    def with_auxiliary(self, micros: list[Microbatch], meters: Meters) -> AbstractContextManager[Add]:
        """Return the context in which a step computes its microbatches. It gives the function that adds a
        microbatch's share of the routers' auxiliary loss to its loss, which changes nothing where there is
        none."""
        if self.balance is None:
            return nullcontext(lambda total, sequences: total)
        return self.balance.over([micro.sequences for micro in micros], meters.add)

    def sync(self, segment: Segment, policy_step: int) -> None:
        """Move the reference to the current policy, that of ``policy_step`` (or towards it, by
        ``sync_alpha``), and score the batches that will be compared with it."""
        at = self.progress
        if self.soft is not None:
            self.soft.follow(self.policy, self.syncing.alpha)
        if (delay := self.syncing.delay) is not None:
            ahead = at.position + delay
            batch = [self.microbatches(segment.batch(ahead))] if ahead < segment.steps else []
            first = at.step - at.position  # the segment's
            self.reference.advance(self.policy, max(first, at.step + 1 - delay), at.step, delay, batch)
            return
        self._refresh(policy_step, self.upcoming(segment, at.position + 1, at.step + 1, policy_step))

    def _refresh(self, policy_step: int, upcoming: Scored) -> None:
        with nullcontext() if self.soft is None else self.soft.in_place_of(self.policy):
            self.reference.refresh(self.policy, policy_step, upcoming)

    def _advance(self, record: StepRecord) -> StepRecord:
        at = self.progress
        at.step += 1
        at.position += 1
        at.examples += len(record.batch)
        at.tokens += record.batch_tokens
        record.known.update(examples=at.examples, tokens=at.tokens)
        return record

    def count(self, skipped: bool, silent: bool) -> int:
        """Record whether a step's update was skipped, or had no signal, once that is known; return how many
        in a row were skipped."""
        at = self.progress
        at.skipped = at.skipped + 1 if skipped else 0
        at.skipped_steps += skipped
        at.silent_steps += silent and not skipped
        return at.skipped

    # -- metrics ---------------------------------------------------------------------------------------

    def metrics(
        self, has_behavior: bool, micro: Microbatch, scores: TokenScores, result: LossResult
    ) -> dict[str, Mean]:
        """Return everything logged for a microbatch as sums and counts; their quotient over the global batch
        is the exact mean. ``has_behavior``: that of the batch."""
        out = {"loss": self.mean_loss(micro, result)} | result.metrics
        if self.config.has_reference:
            key = rejection_key(self.progress.step, micro.sequences)
            out |= self.scorer.humanline.metrics(scores, key)
            out["drift"] = mean_log_ratio(micro, scores, self.initial_logprobs)
            if self.syncing.bound is not None:
                out["reference_kl"] = reference_kl(scores)
            out |= self.correction.metrics(scores, micro)
            if self.config.online or has_behavior:
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
            if self.progress.position == 0 and self.config.has_reference and not self.fixed_reference:
                self.start_segment(segment)
            while self.progress.position < segment.steps:
                watch.before_step(segment)
                if self.progress.step == 0 and self.config.has_reference:
                    watch.before_first_step(segment)
                watch.after_step(self.step(self.dealt(segment), watch.observe))
            self.progress.segment += 1
            self.progress.position = 0
        watch.done()

    def start_segment(self, segment: Segment) -> None:
        """Set the reference to the policy at the start of the segment (Algorithm 1, line 3). Where
        ``rounds.reset_reference`` is false, it stays as it is from the second segment on."""
        step = self.progress.step
        stays = self.config.keeps_reference and self.progress.segment > 0
        if self.soft is not None and not stays:
            self.soft.follow(self.policy, alpha=1.0)
        since = self.reference.step if stays else step
        self._refresh(since, interruptible(self.upcoming(segment, 0, step, since)))
        if self.initial is not None and self.anchor is not None:
            every = ((step + i, self.microbatches(segment.batch(i))) for i in range(segment.steps))
            with self.initial.in_place_of(self.policy):
                self.anchor.refresh(self.policy, 0, interruptible(every))

    @property
    def fixed_reference(self) -> bool:
        """Whether the reference is always the initial weights (offline without syncing), so that it is scored
        once, before training."""
        return not self.config.online and self.config.syncing == "never"

    # -- state of a run --------------------------------------------------------------------------------

    def use_initial_scores(self, rows: Mapping[str, Tensor], scores: Mapping[str, Tensor]) -> None:
        """Store scores of the training rows under the initial weights, [C] nats: ``rows`` (by row key) for
        ``drift``, and ``scores`` for a reference that stays at the initial weights (``fixed_reference``) or a
        KL term that is anchored to them."""
        self.initial_logprobs = rows
        if self.fixed_reference:
            self.reference.scores = scores
        elif self.anchor is not None:
            self.anchor.scores = scores

    def state_dict(self) -> dict[str, Any]:
        """Return the loop's part of a checkpoint as JSON-compatible values."""
        return {
            "progress": asdict(self.progress),
            "reference_step": self.reference.step,
            "dealing": dealing(self.packing, self.shares_prompts, self.work),
        }

    def reference_scores(self) -> dict[str, Tensor]:
        """Return this rank's reference scores up to the next sync, and in this round those of a KL term's
        anchor, on the CPU; empty where they were computed once before training."""
        if self.fixed_reference:
            return {}
        scores = dict(self.reference.scores)
        if self.initial is not None and self.anchor is not None:
            scores |= {ANCHOR + key: values for key, values in self.anchor.scores.items()}
        return {key: values.cpu().contiguous() for key, values in scores.items()}

    def load_state_dict(self, state: dict[str, Any], reference_scores: dict[str, Tensor]) -> None:
        """Continue from where ``state_dict`` and ``reference_scores`` were taken."""
        self.progress = Progress(**state["progress"])
        if not self.fixed_reference:
            self.reference.step = state["reference_step"]
            here = {key: values.to(self.world.device) for key, values in reference_scores.items()}
            self.reference.scores = {k: v for k, v in here.items() if not k.startswith(ANCHOR)}
            if self.initial is not None and self.anchor is not None:
                self.anchor.scores = {
                    k.removeprefix(ANCHOR): v for k, v in here.items() if k.startswith(ANCHOR)
                }
