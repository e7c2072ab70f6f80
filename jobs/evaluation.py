"""Evaluate the policy during a run by rewards on held-out rows, and by accuracy wherever answers can be
checked.

Every variant's rewards are unclipped and relative to the initial weights, so that variants can be compared.
The whole held-out set acts as one global batch: the batch statistics that a loss needs (KTO's z0, PPO's
normalised advantages) are estimated once on all of it. So no number depends on model.eval_batch_size or on
the number of ranks, except for rounding.

What the policy retains of the initial model is measured by the KL divergence on the initial model's own
answers: KL(pi_0 || pi_theta) on the task's prompts correlates with forgetting on other tasks (Shenfeld et al.
2025, RL's Razor, arXiv 2509.04259). Its samples come from pi_0, so they are drawn once and serve every
evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import cast

import numpy as np
import torch
from torch import Tensor

from common.imports import import_function
from common.progress import SOON, interruptible, progress
from data.batches import Segment
from data.chat import Renderer
from data.types import Example, Group, Sequence
from data.views import prompts_of
from jobs.initial_scores import alone, initial_scores
from jobs.plan import EvaluationSet, Plan
from models.distributed import gather_objects, sum_over_ranks
from models.policy import Policy
from models.pretrained import export_dtype
from models.reference import Reference, score
from models.sharding import rounded
from rollouts.answers import Answers, Request
from rollouts.rounds import usable_prompts
from rollouts.samplers import Sampler, SamplingSettings
from rollouts.stop_strings import StopStrings
from rollouts.verify import Accuracy, AnswerRow, Shown, embedded_sampler, make_accuracy
from trainers.basic import BasicTrainer
from trainers.humanline import Humanline
from trainers.meters import Meters

Metrics = dict[str, float | None]


class InitialKL:
    """KL(pi_0 || pi_theta) on answers that the initial weights gave to held-out prompts, nats per token.

    It is the mean over the answers' tokens of the k3 estimator, r - 1 - log r with r = pi_theta / pi_0. Every
    rank calls it and gets the same result.
    """

    def __init__(
        self,
        trainer: BasicTrainer,
        sampler: Sampler,
        groups: Seq[Group],
        renderer: Renderer,
        most: tuple[int, int],
    ) -> None:
        """``groups``: held-out groups, whose first prompts by id are answered. ``most``: how many of them,
        and by how many tokens, at most."""
        config = trainer.config
        prompts = sorted(prompts_of(groups), key=lambda prompt: prompt.id)
        self.trainer, self.renderer = trainer, renderer
        self.prompts, _ = usable_prompts(prompts[: most[0]][: config.n_eval_prompts], renderer)
        settings = SamplingSettings(config.model.logit_temperature, 1.0, most[1])
        self.answers = Answers(sampler, self.prompts, Request("", 1, settings))
        self.rows: list[Sequence] = []
        self.initial: dict[str, Tensor] = {}

    def prepare(self, parts: dict[str, str]) -> None:
        """Draw the answers and score them under the policy, which must still have the initial weights.

        Answers and scores that an earlier run of the same weights left are read from the cache."""
        trainer = self.trainer
        self.answers.use_cache(Path(trainer.config.cache_dir), parts)
        drawn = self.answers(initial=True)
        self.rows = [
            Sequence(self.renderer.prompt_ids(prompt), np.array(sample.token_ids, np.int32))
            for prompt, samples in zip(self.prompts, drawn, strict=True)
            for sample in samples
            if sample.token_ids
        ]
        self.rows.sort(key=lambda row: (-len(row), row.key))
        reference = Reference(by_row=True)
        batch = [[Example(row.key, (row,)) for row in self.rows]]
        what = "score initial answers (retention.kl, retention.prompts)"
        scores = initial_scores(trainer, batch, self.size, reference, parts, what, arranged=True)
        self.initial = {row.key: scores[reference.key(0, row)] for row in self.rows}

    @property
    def likelihoods(self) -> list[float]:
        """The mean token log-probability of each answer under the initial weights, nats."""
        return [float(values.double().mean()) for values in self.initial.values() if len(values)]

    @property
    def size(self) -> int:
        """Number of rows that a rank scores at once."""
        return max(1, self.trainer.config.model.eval_batch_size // self.trainer.world.size)

    @torch.no_grad()
    def __call__(self, initial: bool = False) -> float | None:
        """Return the divergence, nats per token; None if there is no answer. Rows are cut as
        ``initial_scores`` cuts them, so that unchanged weights give exactly the same scores: ``initial``, the
        policy has them, and the divergence is 0."""
        if initial:
            return 0.0 if self.rows else None
        total = torch.zeros(2, dtype=torch.float64)
        cut = (micro for _, micros in alone(self.trainer, [self.rows], self.size) for micro in micros)
        for micro in interruptible(cut):
            scores = score(self.trainer.policy, micro.sequences).double().cpu()
            for row, values in zip(micro.sequences.rows, scores, strict=True):
                if n := len(row.completion_ids):
                    log_ratio = values[:n] - self.initial[row.key].double()
                    total += torch.stack([(torch.expm1(log_ratio) - log_ratio).sum(), torch.tensor(n)])
        kl, tokens = sum_over_ranks(total.to(self.trainer.world.device)).tolist()
        return kl / tokens if tokens else None


class Evaluator:
    """Evaluates the trainer's policy on held-out examples.

    ``held_out``: one epoch of the held-out examples, or None where there are none. ``accuracy`` samples
    answers and checks them, or is None where nothing can be checked. ``initial_kl`` measures the KL
    divergence from the initial weights, or is None. ``dtype`` is the dtype of the exported model: the weights
    are evaluated in the precision in which they will be used.
    ``named``: evaluators of further sets, by name. ``shown``: answers to be read where nothing checks them.
    """

    def __init__(
        self,
        trainer: BasicTrainer,
        held_out: Segment | None,
        accuracy: Accuracy | None,
        dtype: torch.dtype,
        initial_kl: InitialKL | None = None,
        named: Mapping[str, Evaluator] | None = None,
        shown: Shown | None = None,
    ) -> None:
        self.shown = shown
        self.named = dict(named or {})
        self.trainer, self.accuracy, self.initial_kl = trainer, accuracy, initial_kl
        # Weights that the forward casts to the export dtype anyway need no rounding first.
        self.dtype = torch.float32 if dtype == getattr(torch, trainer.config.model.dtype) else dtype
        self.groups = () if held_out is None else held_out.groups
        self.batches = [] if held_out is None else arranged(trainer, held_out)
        self.reference = Reference()
        self.scorer = trainer.scorer_with(self.reference, Humanline())
        self.size = max(
            1, trainer.config.model.eval_batch_size // (trainer.world.size * trainer.rows_per_example)
        )

    def prepare(self, parts: dict[str, str]) -> None:
        """Score the held-out rows under the initial weights, which the policy must still have.

        The weights are rounded to the export dtype. ``parts``: what the scores depend on, the cache's key."""
        for other in self.named.values():
            other.prepare(parts)
        parts = parts | {"rounded to": str(self.dtype)}
        for measured in (self.accuracy, self.shown):
            if measured is not None:
                measured.use_cache(Path(self.trainer.config.cache_dir), parts)
        if self.initial_kl is not None:
            with rounded(self.trainer.policy, self.dtype):
                self.initial_kl.prepare(parts)
        if self.batches and self.trainer.config.has_reference:
            with rounded(self.trainer.policy, self.dtype):
                scored = (self.trainer, self.batches, self.size, self.reference, parts)
                what = "score held-out rows (n_eval_examples)"
                self.reference.scores = initial_scores(*scored, what, arranged=True)

    def evaluate(self, initial: bool = False) -> Metrics:
        """Return the metrics of the current weights, the same on every rank.

        They are ``eval_loss``, ``eval_reward_{chosen,rejected,margin,accuracy}`` and ``eval_drift`` (nats per
        token), or without a reference the loss's own metrics. Where answers can be checked:
        ``eval_accuracy_{sampled,greedy}`` and ``eval_length_sampled`` (tokens per answer). On the initial
        weights' answers: ``eval_kl_initial`` (nats per token). Metrics of a named set have its name after
        ``eval_``.

        ``initial``: the policy has the initial weights, whose scores are known from ``prepare``, and whose
        answers an earlier run may have cached."""
        with rounded(self.trainer.policy, self.dtype):
            self.scorer.unmoved = initial  # rows are cut as ``prepare`` cut them: the same bits
            out: Metrics = self._scores() if self.batches else {}
            if self.accuracy is not None:
                out |= self.accuracy(initial)
            if self.initial_kl is not None:
                out["kl_initial"] = self.initial_kl(initial)
        metrics = {f"eval_{name}": value for name, value in out.items()}
        for name, other in self.named.items():
            measured = other.evaluate(initial).items()
            metrics |= {f"eval_{name}_{key.removeprefix('eval_')}": value for key, value in measured}
        return metrics

    def answers(self, initial: bool) -> list[AnswerRow]:
        """Return a few answers to held-out prompts as rows of ``rollouts.verify.COLUMNS``: those that the
        last evaluation checked, or else new ones, to be read."""
        if self.accuracy is not None or self.shown is None:
            return [] if self.accuracy is None else self.accuracy.samples
        with rounded(self.trainer.policy, self.dtype):
            return self.shown(initial)

    @torch.no_grad()
    def _scores(self) -> Metrics:
        trainer, meters = self.trainer, Meters()
        rewards: dict[str, tuple[float, int]] = {}
        micros = [
            (i, micro)
            for i, batch in enumerate(self.batches)
            for micro in trainer.dealer.share(batch, self.size)
        ]
        prepared = trainer.prepare(micros, self.scorer)
        todo = progress(
            list(zip(micros, prepared, strict=True)),
            "evaluate (n_eval_examples)",
            unit="forward",
            shown=trainer.world.is_main,
            delay=SOON,
        )
        for (i, micro), item in interruptible(todo):
            scores = self.scorer.score_without_gradient(i, micro.sequences)
            result = trainer.compute_loss(micro, scores, item)
            meters.add(
                {"loss": trainer.mean_loss(micro, result)}
                | ({} if trainer.config.has_reference else result.metrics)
            )
            rows = zip(micro.sequences.rows, scores.sequence_log_ratio().tolist(), strict=True)
            rewards |= {row.key: (s, len(row.counted)) for row, s in rows if len(row.counted)}
        out = meters.reduce().read()
        if trainer.config.has_reference:
            for other in gather_objects(rewards):
                rewards |= other
            out |= self._rewards(rewards)
        return out

    def _rewards(self, rewards: dict[str, tuple[float, int]]) -> Metrics:
        """Return the mean rewards of chosen (or desirable) and rejected rows, the margin and the accuracy.

        Margin and accuracy are means over the comparisons of ``_compared``; the accuracy is the share with
        the chosen above the rejected rows, a tie counting one half. Without any comparison the margin is the
        difference of the two mean rewards, and the accuracy is None. ``rewards``: row key -> (log-ratio in
        nats, completion tokens)."""
        config = self.trainer.config
        scaled = config.accepts.beta_scales_rewards and config.has_reference
        scale = float(config.loss.get("beta", 1.0)) if scaled else 1.0
        chosen, rejected, margins = list[float](), list[float](), list[float]()
        for rows in self._compared():
            high = [scale * rewards[key][0] for key, label in rows if label > 0]
            low = [scale * rewards[key][0] for key, label in rows if label < 0]
            chosen, rejected = chosen + high, rejected + low
            if high and low:
                margins.append(fmean(high) - fmean(low))
        tokens = sum(n for _, n in rewards.values())
        margin = fmean(chosen) - fmean(rejected) if chosen and rejected else None
        return {
            "reward_chosen": fmean(chosen) if chosen else None,
            "reward_rejected": fmean(rejected) if rejected else None,
            "reward_margin": fmean(margins) if margins else margin,
            "reward_accuracy": fmean((m > 0) + 0.5 * (m == 0) for m in margins) if margins else None,
            "drift": sum(s for s, _ in rewards.values()) / tokens if tokens else None,
        }

    def _compared(self) -> list[list[tuple[str, float]]]:
        """Return (row key, +1 better or -1 worse) of the held-out rows, one list per comparison.

        The two rows of a pair are compared, whether the pair is one example or split in two. In a larger
        group the mean of the better completions is compared with the mean of the worse. Examples that stand
        alone in the data are compared with the other such examples of their prompt."""
        groups: list[list[tuple[str, float]]] = []
        alone: dict[str, list[tuple[str, float]]] = {}
        for group in self.groups:
            rows = [
                (row.key, sign)
                for example in group
                for row, sign in zip(
                    example.rows, (1.0, -1.0) if len(example.rows) == 2 else (example.label,), strict=True
                )
            ]
            if len(rows) > 1:
                groups.append(rows)
            else:
                alone.setdefault(group[0].prompt_id, []).extend(rows)
        return groups + list(alone.values())


def make_evaluator(
    trainer: BasicTrainer, plan: Plan, sets: Seq[EvaluationSet], renderer: Renderer, stops: StopStrings | None
) -> Evaluator:
    """Return the evaluator of a run, further ``sets`` included. Every rank calls it. ``stops``: what ends an
    answer that a verifier judges, besides an end token."""
    config, world, held_out = trainer.config, trainer.world, plan.evaluation.groups
    policy = cast(Policy, trainer.policy)
    accuracy = make_accuracy(config, policy, renderer, held_out, world, stops=stops)
    initial_kl = shown = None
    if held_out and config.model.head != "reward":
        prompts, tokens = config.retention.counts(world.device.type)
        tokens = min(tokens, config.model.max_length - config.model.max_prompt_length)
        sampler_arguments = (config, policy, renderer, world)
        if config.retention.kl:
            what = "initial answers (retention.kl, retention.prompts, retention.tokens)"
            sampler = embedded_sampler(*sampler_arguments, what)
            initial_kl = InitialKL(trainer, sampler, held_out, renderer, (prompts, tokens))
        if accuracy is None:
            sampler = embedded_sampler(*sampler_arguments, "answers to read (retention.tokens)")
            shown = Shown(sampler, prompts_of(held_out), renderer, tokens)

    def accuracy_on(one: EvaluationSet) -> Accuracy | None:
        if not one.checkable:
            return None
        if accuracy is not None and replace(one.data, verifier=config.data.verifier) == config.data:
            verifier = import_function(f"evaluations.{one.name}.verifier", one.data.verifier or "")
            return accuracy.with_verifier(verifier)
        ends = stops if one.data.source == config.data.source else None
        arguments = (config, policy, renderer, one.checkable, world, one.data, ends)
        return make_accuracy(*arguments, section=f"evaluations.{one.name}")

    dtype = export_dtype(config.model)
    named = {one.name: Evaluator(trainer, one.held_out, accuracy_on(one), dtype) for one in sets}
    return Evaluator(trainer, plan.held_out, accuracy, dtype, initial_kl, named, shown)


def arranged(trainer: BasicTrainer, held_out: Segment) -> list[list[Example]]:
    """Return the batches of ``held_out``, arranged by the trainer as one global batch in the data's order."""
    examples = [example for group in held_out.groups for example in group]
    of_example = dict(zip(examples, trainer.arrange(examples), strict=True))
    return [[of_example[example] for example in held_out.batch(i)] for i in range(held_out.steps)]
