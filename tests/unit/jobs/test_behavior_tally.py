"""What is added up of samples against the policy: against a loop over the tokens, however rows are cut, and
after a restart."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from data.batches import microbatch
from data.types import Example, Sequence
from jobs.behavior_tally import BehaviorTally, age_of
from models.distributed import start
from reports.metrics import COLUMNS
from trainers.losses.base import TokenScores

CPU = torch.device("cpu")
STEP = 40


@pytest.fixture(autouse=True)
def processes():
    start()


def examples(seed: int, n: int = 12) -> list[Example]:
    """Pairs of many lengths, ages and unknown tokens; two of them of no round of this run."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(n):
        rows = []
        for _ in range(2):
            length = int(rng.integers(1, 40))
            mu = np.where(rng.random(length) < 0.2, np.nan, rng.normal(-1, 0.7, length)).astype(np.float32)
            known = None if i == 3 else mu
            rows.append(Sequence(np.ones(2, np.int32), rng.integers(0, 9, length, dtype=np.int32), known))
        step = None if i in (1, 5) else STEP - int(rng.choice([0, 1, 2, 3, 4, 7, 8, 31]))
        made.append(Example(f"p{i}", tuple(rows), sampled_step=step))
    return made


def scored(micro, weighed: bool) -> TokenScores:
    """Scores that are a function of the row's tokens, whatever batch they stand in."""
    mask = micro.sequences.mask
    policy, weights = torch.zeros(mask.shape), torch.ones(mask.shape)
    for r, row in enumerate(micro.sequences.rows):
        rng = np.random.default_rng(int(row.key[:8], 16))
        n = len(row.completion_ids)
        policy[r, :n] = torch.from_numpy(rng.normal(-1, 0.7, n)).float()
        weights[r, :n] = torch.from_numpy(rng.choice([0.0, 0.5, 1.7], n)).float()
    policy.requires_grad_()
    return TokenScores(policy, policy.detach(), policy * 0, mask, weights if weighed else None)


def filled(*parts: list[Example], weighed: bool = True) -> BehaviorTally:
    tally = BehaviorTally(CPU)
    for part in parts:
        micro = microbatch(part, CPU)
        tally.add(micro, scored(micro, weighed), STEP)
    return tally


def test_it_is_what_a_loop_over_the_tokens_adds_up():
    given = examples(0)
    micro = microbatch(given, CPU)
    scores = scored(micro, weighed=True)
    sums = {"positions": {}, "ages": {}}
    for r, row in enumerate(micro.sequences.rows):
        age = age_of(given[r % len(given)], STEP)
        for t in range(len(row.completion_ids)):
            mu = math.nan if row.behavior_logprobs is None else float(row.behavior_logprobs[t])
            known, w = not math.isnan(mu), float(scores.weights[r, t])
            gap = float(scores.policy[r, t].detach()) - mu if known else 0.0
            ratio = math.exp(gap) if known else 0.0
            kl = math.exp(gap) - 1 - gap
            values = np.array([1, known, kl, ratio, ratio**2, w, w**2, w == 0])
            place = int(math.log2(t + 1))
            sums["positions"][place] = sums["positions"].get(place, 0) + values
            if age >= 0:
                bin_ = 0 if age == 0 else 1 + int(math.log2(age))
                sums["ages"][bin_] = sums["ages"].get(bin_, 0) + values
    tally = filled(given)
    found = tally.describe(tally.total())
    for name, expected in sums.items():
        assert len(found[name]) == max(expected) + 1
        for b, row in enumerate(found[name]):
            assert row == pytest.approx(expected.get(b, np.zeros(len(COLUMNS))), rel=1e-4, abs=1e-4)


def test_how_the_rows_are_cut_does_not_matter():
    given = examples(1)
    whole, parts = filled(given), filled(*(given[k : k + 5] for k in range(0, 12, 5)))
    assert parts.describe(parts.total()) == whole.describe(whole.total())


def test_a_restart_in_between_changes_nothing_to_the_bit():
    whole, before = filled(examples(2), examples(3)), filled(examples(2))
    after = BehaviorTally(CPU)
    after.restore(before.total(), mine=True)
    micro = microbatch(examples(3), CPU)
    after.add(micro, scored(micro, weighed=True), STEP)
    assert after.total() == whole.total() != before.total()


def test_of_text_that_nobody_sampled_nothing_is_said():
    given = [
        replace(e, rows=tuple(replace(row, behavior_logprobs=None) for row in e.rows)) for e in examples(4)
    ]
    tally = filled(given, weighed=False)
    assert tally.describe(tally.total()) is None and not any(tally.total())
    known = filled(examples(4), weighed=False)
    assert known.describe(known.total()) is not None
