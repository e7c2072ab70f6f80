"""The paper's claims checked against the runs, each with its comparison, the size of the difference, and a
one-word verdict."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml  # type: ignore[import-untyped]
from scipy import stats

from common.errors import require
from reports.statistics import SIGNIFICANT, Comparison, Mean, holm, mean, paired
from study.records import Record

CLAIMS = Path(__file__).parent / "adder" / "claims.yaml"
SEEN, NOT_SEEN, REVERSED, NOT_RUN = "seen", "not seen", "reversed", "not run"
GREATER, MATCH, SAME = "greater", "match", "same"
FEWEST_SEEDS = 3
"""Seeds that a claim needs: with fewer, a paired test has hardly any power and the claim counts as not
run."""


@dataclass(frozen=True)
class Claim:
    """A claim and the pairs of cells (b, a) that answer it; ``claims.yaml`` explains the kinds of claims."""

    title: str
    source: str
    paper: str
    experiment: str
    kind: str
    pairs: tuple[tuple[str, str], ...]
    why: str
    """A guess at the reason where the claim is not seen, written after the results were known."""

    def about(self, cells: Collection[str]) -> Claim:
        """Return the claim with only those of its pairs whose cells are both in ``cells``."""
        return replace(self, pairs=tuple((b, a) for b, a in self.pairs if b in cells and a in cells))


@dataclass(frozen=True)
class Answer:
    """One pair's answer. ``difference``: b - a of the metric over the seeds that both have; ``interval``: its
    95 % t-interval."""

    claim: Claim
    b: str
    a: str
    verdict: str
    difference: Mean | None = None
    interval: tuple[float, float] | None = None
    p: float | None = None
    p_holm: float | None = None
    other: Mean | None = None
    """The same difference in greedy accuracy, for comparison; it is not tested."""


@dataclass(frozen=True)
class Findings:
    """The findings of a report on one task."""

    said: str
    """The text to print."""
    title: str
    measure: str
    """The metric in words."""
    answers: tuple[Answer, ...]
    values: Mapping[str, Mapping[int, float]]
    """Cell -> seed -> the metric after training."""
    base: float | None
    """The metric of the model from which all runs start."""
    margin: float
    runs: int
    planned: int


def read_claims(path: Path = CLAIMS) -> tuple[list[Claim], float, str]:
    """Return (claims, margin, metric) of a claims file."""
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    claims = [Claim(**entry | {"pairs": tuple((b, a) for b, a in entry["pairs"])}) for entry in raw["claims"]]
    for claim in claims:
        require(
            claim.kind in (GREATER, MATCH, SAME),
            "claims.kind",
            claim.kind,
            f"must be {GREATER}, {MATCH} or {SAME}",
        )
    return claims, float(raw["margin"]), str(raw["metric"])


def by_cell(records: Sequence[Record], metric: str) -> dict[str, dict[int, float]]:
    """Return cell -> seed -> value."""
    found: dict[str, dict[int, float]] = {}
    for record in records:
        if metric in record.after:
            found.setdefault(record.cell, {})[record.seed] = record.after[metric]
    return found


def answers(
    claims: Sequence[Claim],
    values: Mapping[str, Mapping[int, float]],
    margin: float,
    greedy: Mapping[str, Mapping[int, float]],
    others: Sequence[float] = (),
) -> list[Answer]:
    """Return an answer to each pair of each claim. Holm's correction covers every test of a ``greater`` claim
    that could be made, and those of other tasks, whose p-values are ``others``."""
    tested: list[tuple[Claim, str, str, Comparison | None]] = []
    for claim in claims:
        for b, a in claim.pairs:
            both = differences(values, b, a)
            tested.append((claim, b, a, paired(a, b, both) if len(both) >= FEWEST_SEEDS else None))
    family = [
        i
        for i, (claim, _, _, comparison) in enumerate(tested)
        if claim.kind == GREATER and comparison is not None
    ]
    own = [_p(tested[i][3]) for i in family]
    adjusted = dict(zip(family, holm([*own, *others])[: len(own)], strict=True))
    return [
        _answer(*one, adjusted.get(i), margin, mean(differences(greedy, one[1], one[2])))
        for i, one in enumerate(tested)
    ]


def _p(comparison: Comparison | None) -> float | None:
    return None if comparison is None else comparison.p_t


def p_values_of(found: Sequence[Answer]) -> list[float]:
    """Return the p-values of the tests among the answers."""
    return [a.p for a in found if a.claim.kind == GREATER and a.p is not None]


def differences(values: Mapping[str, Mapping[int, float]], b: str, a: str) -> list[float]:
    """Return b - a, seed by seed: runs of a seed see the same data in the same order and are evaluated with
    the same random numbers."""
    seeds = sorted(values.get(b, {}).keys() & values.get(a, {}).keys())
    return [values[b][seed] - values[a][seed] for seed in seeds]


def _answer(
    claim: Claim,
    b: str,
    a: str,
    comparison: Comparison | None,
    p_holm: float | None,
    margin: float,
    other: Mean | None,
) -> Answer:
    blank = Answer(claim, b, a, NOT_RUN)
    if comparison is None:
        return blank
    low, high = interval(comparison.difference)
    found = replace(
        blank,
        difference=comparison.difference,
        interval=(low, high),
        p=comparison.p_t,
        p_holm=p_holm,
        other=other,
    )
    return replace(
        found, verdict=verdict(claim.kind, comparison.difference.value, (low, high), p_holm, margin)
    )


def verdict(
    kind: str, difference: float, interval: tuple[float, float], p_holm: float | None, margin: float
) -> str:
    """Return the verdict in one word. ``greater`` uses the corrected test; ``match`` and ``same`` compare the
    interval with the margin, and are reversed if the interval lies entirely beyond it."""
    low, high = interval
    if kind == GREATER:
        if p_holm is None or p_holm >= SIGNIFICANT:
            return NOT_SEEN
        return SEEN if difference > 0 else REVERSED
    if kind == MATCH:
        return SEEN if low > -margin else REVERSED if high < -margin else NOT_SEEN
    return (
        SEEN if -margin < low and high < margin else REVERSED if low > margin or high < -margin else NOT_SEEN
    )


def interval(value: Mean) -> tuple[float, float]:
    """Return the 95 % confidence interval of a mean over seeds (Student's t); infinite for one seed."""
    if value.error is None:
        return -math.inf, math.inf
    half = float(stats.t.ppf(0.975, value.n - 1)) * value.error
    return value.value - half, value.value + half
