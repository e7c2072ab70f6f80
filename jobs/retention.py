"""Measure how much of the initial model the policy retains, by the KL divergence on the initial model's own
answers.

KL(pi_0 || pi_theta) on the task's prompts correlates with forgetting on other tasks (Shenfeld et al. 2025,
RL's Razor, arXiv 2509.04259). Its samples come from pi_0, so they are drawn once and serve every evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.progress import interruptible
from data.chat import Renderer
from data.types import Example, Group, Sequence
from data.views import prompts_of
from jobs.initial_scores import alone, initial_scores
from models.distributed import sum_over_ranks
from models.reference import Reference, score
from rollouts.answers import Answers, Request
from rollouts.rounds import usable_prompts
from rollouts.samplers import Sampler, SamplingSettings
from trainers.basic import BasicTrainer


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
