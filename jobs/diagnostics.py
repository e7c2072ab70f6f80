"""Diagnostics of a run beyond its metrics, for ``diagnostics.jsonl``, figures of the report and histograms in
wandb (docs/diagnostics.md).

A run is split into at most LINES intervals with equal numbers of steps. Each interval records the
distribution of the tokens' unclipped log-ratios against the reference that the loss saw, how many of them
lie beyond the clipping range, drift, and the policy's entropy at the interval's end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from data.types import Example, Microbatch
from jobs.plan import Plan
from models.distributed import sum_over_ranks
from models.sharding import reshard
from reports.tracking import Tracker
from trainers.basic import BasicTrainer
from trainers.losses.base import TokenScores, token_sum
from trainers.meters import change_since

LINES = 32
"""Largest number of intervals that a run is split into."""
SAMPLE = 16
"""Number of examples, over all ranks, on whose rows the policy's entropy is measured."""
SIDES = ("chosen", "rejected", "neutral")
"""Chosen: chosen rows of pairs, desirable examples, completions of positive advantage. Rejected: their
opposites. Neutral: completions of advantage 0."""
OCTAVES = range(-20, 5)
EDGES = tuple(sign * 2.0**o for sign, octaves in ((-1, reversed(OCTAVES)), (1, OCTAVES)) for o in octaves)
"""Edges of the histogram's bins, nats: -16, -8 … -2^-20, 2^-20 … 8, 16. Log-ratios span many orders of
magnitude: a step's noise is 1e-6 in float32, a clipped token 1.5. A bin includes its upper edge; the outer
two bins are open."""
BINS = len(EDGES) + 1
WIDTH = BINS + 8
"""Number of sums of a side: bins, and eight over all."""
DIGITS = 6
"""Significant digits of written numbers; further digits may change, as ranks sum in another order after a
restart."""


def sides(micro: Microbatch) -> Tensor:
    """Return the index in SIDES that each row belongs to, [R] int64."""
    n, device = len(micro.examples), micro.labels.device
    if len(micro.sequences.rows) == 2 * n:
        return torch.arange(2 * n, device=device) // n
    labels = micro.labels
    return torch.where(labels > 0, 0, torch.where(labels < 0, 1, 2))


class Tally:
    """Sums over the rows and tokens that this rank has seen, [sides, WIDTH] float64, in which counts are
    exact. ``low`` and ``high``: the clipping range of log-ratios, nats."""

    def __init__(self, low: float, high: float, device: torch.device) -> None:
        self.low, self.high = low, high
        self._edges = torch.tensor(EDGES, device=device)
        self.sums = torch.zeros(len(SIDES), WIDTH, dtype=torch.float64, device=device)

    def total(self) -> list[list[float]]:
        """Return the sums over all ranks, the same on every rank. The host waits for the device."""
        out: list[list[float]] = sum_over_ranks(self.sums.clone()).tolist()
        return out

    def restore(self, total: Sequence[Sequence[float]], mine: bool) -> None:
        """Continue from ``total``, the sums over all ranks; the rank with ``mine`` takes them, the others 0.

        So the number of ranks may change."""
        self.sums.copy_(torch.tensor(total, dtype=torch.float64) * mine)

    def add(self, side: Tensor, raw: Tensor, mask: Tensor, moved: Tensor, comparable: Tensor) -> None:
        """Add R rows.

        ``side``: [R] index in SIDES. ``raw``: [R, T] unclipped log-ratios, nats. ``mask``: [R, T] completion
        tokens. ``moved``: [R] the rows' log-probabilities now minus those under the initial weights, nats,
        valid where ``comparable`` [R] is true."""
        bins = side[:, None] * WIDTH + torch.bucketize(raw, self._edges)
        self.sums.view(-1).index_add_(0, bins.flatten(), mask.double().flatten())
        tokens, exact = mask.sum(dim=-1), raw.double()
        rows = torch.stack(
            [
                mask.any(dim=-1),
                tokens,
                token_sum(exact, mask),
                token_sum(exact.square(), mask),
                torch.where(comparable, tokens, 0),
                torch.where(comparable, moved, 0.0),
                (mask & (raw < self.low)).sum(dim=-1),
                (mask & (raw > self.high)).sum(dim=-1),
            ],
            dim=1,
        ).double()
        of_side = side == torch.arange(len(SIDES), device=side.device)[:, None]
        self.sums[:, BINS:] += of_side.double() @ rows

    def describe(self, total: Sequence[Sequence[float]]) -> dict[str, dict[str, Any]]:
        """Return ``total`` as plain data: side -> its counts and means, for each side that has rows."""
        out: dict[str, dict[str, Any]] = {}
        for name, sums in zip(SIDES, total, strict=True):
            rows, tokens, log_ratio, square, compared, moved, below, above = sums[BINS:]
            if rows:
                out[name] = {
                    "rows": int(rows),
                    "tokens": int(tokens),
                    "length": rounded(tokens / rows),
                    "log_ratio": rounded(log_ratio / tokens),
                    "spread": rounded(math.sqrt(max(square, 0.0) / tokens)),
                    "drift": rounded(moved / compared) if compared else None,
                    "histogram": [int(n) for n in sums[:BINS]],
                    "below": int(below),
                    "above": int(above),
                }
        return out


def rounded(value: float) -> float | None:
    """Return ``value`` rounded to DIGITS significant digits; None if it is not finite."""
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


class Diagnostics:
    """Follows a trainer whose loss has a reference.

    ``examples``: entropy is measured on the first SAMPLE of these, or not at all if there are none.
    ``steps``: number of steps of the whole plan."""

    def __init__(self, trainer: BasicTrainer, examples: list[Example], steps: int) -> None:
        self.trainer, self.sample = trainer, examples[:SAMPLE]
        self.every = max(1, math.ceil(steps / LINES))
        config = trainer.config
        self.tally = Tally(config.log_epsilon_P, config.log_epsilon_R, trainer.world.device)
        self.first = 0
        """The first step of the current interval."""
        self._step: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = []

    @classmethod
    def of_run(cls, trainer: BasicTrainer, plan: Plan) -> Diagnostics | None:
        """Return the diagnostics of a run; None if they are off or the loss has no reference."""
        config = trainer.config
        if not (config.diagnostics and config.has_reference):
            return None
        sample = plan.held_out or (None if config.online else plan.train)
        return cls(trainer, [] if sample is None else sample.batch(0), plan.steps)

    def observe(self, micro: Microbatch, scores: TokenScores) -> None:
        """Take a microbatch of a step, without waiting for the device."""
        moved, comparable = change_since(micro, scores, self.trainer.reference.initial_logprobs)
        raw = (scores.policy - scores.reference).detach()
        self._step.append((sides(micro), raw, scores.mask, moved, comparable))

    def step_ends(self) -> None:
        """Add the step's microbatches. Those of a step that is interrupted are never added."""
        for micro in self._step:
            self.tally.add(*micro)
        self._step.clear()

    # -- lines -------------------------------------------------------------------------------------

    def begin(self, tracker: Tracker) -> None:
        """Write the first line of the file, before step 0.

        It holds what is needed to read the other lines, and the quantities that are measured once."""
        config = self.trainer.config
        tracker.diagnostics(
            {
                "step": -1,
                "every": self.every,
                "edges": list(EDGES),
                "sides": list(SIDES),
                "log_epsilon_P": config.log_epsilon_P,
                "log_epsilon_R": config.log_epsilon_R,
                "clips": config.humanline and config.humanline_mode == "clip",
                "entropy": self.entropy(),
            },
            {},
        )

    def due(self) -> bool:
        """Whether an interval ends before the next step."""
        step = self.trainer.progress.step
        return step > self.first and step % self.every == 0

    def write(self, tracker: Tracker) -> None:
        """Write the line for the steps since the last line, if there were any. Every rank calls it."""
        at = self.trainer.progress
        if at.step == self.first:
            return
        log_ratios = self.tally.describe(self.tally.total())
        histograms = {
            f"log_ratio_{side}": (values["histogram"], EDGES) for side, values in log_ratios.items()
        }
        tracker.diagnostics(
            {
                "step": at.step - 1,
                "first_step": self.first,
                "examples": at.examples,
                "tokens": at.tokens,
                "entropy": self.entropy(),
                **log_ratios,
            },
            histograms,
        )
        self.tally.sums.zero_()
        self.first = at.step

    # -- going on ----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the state of the current interval for a checkpoint. Every rank calls it."""
        return {"first": self.first, "total": self.tally.total()}

    def restore(self, state: dict[str, Any]) -> None:
        self.first = state["first"]
        self.tally.restore(state["total"], mine=self.trainer.world.is_main)

    # -- measured on the weights as they are -------------------------------------------------------

    @torch.no_grad()
    def entropy(self) -> float | None:
        """Return the policy's mean entropy over the sample's completion tokens, nats per token.

        None without a sample."""
        trainer = self.trainer
        size = trainer.config.model.eval_batch_size // (trainer.world.size * trainer.rows_per_example)
        micros = trainer.dealer.microbatches(self.sample, max(1, size)) if self.sample else []
        total = torch.zeros(2, dtype=torch.float64, device=trainer.world.device)
        for micro in micros:
            _, values = trainer.policy(micro.sequences, entropy=True)
            reshard(trainer.policy)
            total += torch.stack(
                [token_sum(values.double(), micro.sequences.mask).sum(), micro.sequences.mask.sum().double()]
            )
        entropies, tokens = sum_over_ranks(total).tolist()
        return rounded(entropies / tokens) if tokens else None
