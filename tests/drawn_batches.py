"""Batches of rows with drawn lengths, and how evenly ranks are loaded with them."""

from __future__ import annotations

import numpy as np

from benchmarks.steps import Pair, shape
from data.balance import Work
from data.batches import deal
from data.types import Example, Sequence
from data.views import mismatched

Slots = list[list[list[Example]]]
COMPUTED = shape("qwen2.5-1.5b")
"""The architecture whose operations are counted."""
DRAWN = ("log-normal", "heavy", "bimodal")
GROUP = 8
"""Answers to a prompt in GRPO."""


def pairs_of(kind: str, count: int, longest: int) -> list[Pair]:
    """``count`` pairs of rows whose answers are log-normal, Pareto with exponent 1.2, or three in ten far
    longer."""
    rng = np.random.default_rng(0)
    prompts = np.clip(150 * np.exp(0.6 * rng.standard_normal(count)), 1, longest // 4).astype(int)
    drawn = {
        "log-normal": lambda n: 280 * np.exp(0.8 * rng.standard_normal(n)),
        "heavy": lambda n: 120 * (1 + rng.pareto(1.2, n)),
        "bimodal": lambda n: np.where(rng.random(n) < 0.7, 200, 2000) * np.exp(0.3 * rng.standard_normal(n)),
    }[kind](2 * count)
    answers = np.clip(drawn, 1, longest - longest // 4).astype(int)
    return [
        (row(i, p, a), row(i, p, b))
        for i, (p, a, b) in enumerate(zip(prompts, answers[:count], answers[count:], strict=True))
    ]


def row(prompt: int, p: int, c: int) -> Sequence:
    return Sequence(np.full(p, prompt, np.int32), np.zeros(c, np.int32))


def batch_of(
    pairs: list[Pair], loss: str, count: int, longest: int, rng: np.random.Generator
) -> list[Example]:
    """A batch of ``count`` examples of the loss. A group's answers are those of as many pairs."""
    drawn = [pairs[i] for i in rng.choice(len(pairs), count, replace=count > len(pairs))]
    if loss == "dpo":
        return [Example(f"p{i}", pair) for i, pair in enumerate(drawn)]
    if loss == "kto":
        return mismatched([Example(f"p{i}", pair[:1]) for i, pair in enumerate(drawn)], longest)
    rows = []
    for i, (answer, _) in enumerate(drawn):
        prompt = drawn[i - i % GROUP][0].prompt_ids
        rows.append(Sequence(prompt, answer.completion_ids[: longest - len(prompt)]))
    return [Example(f"p{i // GROUP}", (own,)) for i, own in enumerate(rows)]


def busy(slots: Slots, work: Work, shared: bool) -> tuple[float, float]:
    """(The mean load over ranks, summed over slots, divided by the largest load, summed over slots; the
    latter.) The first is 1 if no rank waits."""
    loads = np.array([[work.part(part, shared) for part in slot] for slot in slots], float)
    return float(loads.mean(axis=1).sum() / loads.max(axis=1).sum()), float(loads.max(axis=1).sum())


def allowed(costs: list[int], ranks: int, size: int) -> float:
    """The most even that a batch of these ``costs``, in ascending order, can be: the rank that has the
    longest example has the shortest others beside it, and the others of its slot at most the longest."""
    mean, most = sum(costs) / ranks, sum(costs[-ranks * size :]) / ranks
    return mean / (mean + max(0.0, costs[-1] + sum(costs[: size - 1]) - most))


def measure(
    pairs: list[Pair], loss: str, ranks: int, size: int, slots: int, longest: int
) -> tuple[float, float]:
    """Deal a batch drawn from ``pairs`` of as many examples as fill every rank in every slot: (the evenness
    of operations, the most that the longest example allows beside the shortest others)."""
    work, width = Work.of(COMPUTED, other=1 / 2), 2 if loss == "dpo" else 1
    batch = batch_of(pairs, loss, ranks * slots * size, longest, np.random.default_rng(0))
    even, _ = busy(deal(batch, ranks, size, width, work=work), work, False)
    return even, allowed(sorted(work.part([example]) for example in batch), ranks, size)
