"""The reasons given for the claims that were not seen, held against what the runs measured.

A claim's ``shown_by`` in ``claims.yaml`` says what its reason predicts: ``measure: lower`` or ``higher``, of
the claim's cell b against a, paired by seed, or ``measure: below X``, of b alone. The 95 % interval over
seeds lies on the predicted side (*supported*), on the other (*excluded*), or on both (*open*).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from common.errors import require
from launch.grid import Settings
from reports.statistics import Mean, mean
from study.claims import FEWEST_SEEDS, NOT_RUN, SEEN, Answer, Claim, interval
from study.pages import Section
from study.plan import Plan
from study.records import Record
from study.why import CHOSEN, KL, LENGTH, REJECTED, example_weight, reward_scale

SUPPORTED, EXCLUDED, OPEN = "supported", "excluded", "open"
PREDICTION = re.compile(r"lower|higher|below \d+(\.\d+)?")


@dataclass(frozen=True)
class Measure:
    """Something that was measured in every run beside the result."""

    title: str
    form: str
    """How a value is printed."""
    of: Callable[[Record, float], float | None]
    """(Run, its factor from nats to the evaluation's reward) -> the value; None if it was not measured."""


def moved(key: str) -> Callable[[Record, float], float | None]:
    return lambda run, scale: run.after[key] / scale if key in run.after else None


def longer(run: Record, scale: float) -> float | None:
    both = run.before.get(LENGTH), run.after.get(LENGTH)
    return None if None in both else both[1] - both[0]  # type: ignore[operator]


MEASURES = {
    "chosen": Measure("chosen answers moved, nats a sequence", "{:+.2f}", moved(CHOSEN)),
    "rejected": Measure("rejected answers moved, nats a sequence", "{:+.2f}", moved(REJECTED)),
    "kl": Measure("KL from the start, nats a token", "{:+.3f}", lambda run, scale: run.after.get(KL)),
    "length": Measure("sampled answers became longer, tokens", "{:+.2f}", longer),
    "clipped": Measure("share of tokens clipped", "{:.3%}", lambda run, scale: run.clipped),
    "weight": Measure("weight of an example", "{:+.3f}", lambda run, scale: example_weight(run)),
}


def mechanism_sections(
    plan: Plan, found: Sequence[Answer], final: Sequence[Record], chosen: Mapping[str, Settings]
) -> list[Section]:
    """Return the section on the reasons of claims that were not seen; none if all were."""
    missed = [answer for answer in found if answer.verdict not in (SEEN, NOT_RUN)]
    if not missed:
        return []
    rows = [["claim", "cells", "verdict", "reason", "it predicts", "measured", "so the reason is"]]
    last = ""
    for answer in missed:
        title, reason = (answer.claim.title, answer.claim.why) if answer.claim.title != last else ("", "")
        last = answer.claim.title
        about = [title, f"{answer.b}, {answer.a}", answer.verdict, reason]
        for name, said in predictions(plan, answer).items():
            rows.append([*about, *evidence(plan, answer, name, said, final, chosen)])
            about = ["", "", "", ""]
    text = (
        "What each reason predicts of something else that was measured, and what was measured: b − a, paired "
        "by seed, with 95 % intervals, or b alone where a bound is predicted. No interval is corrected "
        "for their number, and most reasons were written when the measurements were known. A measurement can "
        "exclude a reason; where it supports one, others may predict the same. A reason that predicts "
        "nothing measurable is a guess.",
    )
    return [Section("Why not: reasons, held against what was measured", text, rows)]


def predictions(plan: Plan, answer: Answer) -> Mapping[str, str]:
    """Return what a claim's reason predicts of a pair of its cells; an example's weight is that of DPO's
    loss."""
    dpo = plan.losses[plan.parent(answer.b)] == "dpo"
    said = {name: text for name, text in answer.claim.shown_by.items() if dpo or name != "weight"}
    return said or {"": ""}


def check_predictions(claims: Sequence[Claim]) -> None:
    """Raise ConfigError for a prediction of something that is not measured, or that cannot be checked."""
    for claim in claims:
        for name, said in claim.shown_by.items():
            key = f"claims.shown_by ({claim.title}): {name}"
            require(name in MEASURES, key, said, f"is not measured; there are {', '.join(MEASURES)}")
            require(
                PREDICTION.fullmatch(str(said)) is not None, key, said, "must be lower, higher or below X"
            )


def evidence(
    plan: Plan,
    answer: Answer,
    name: str,
    said: str,
    final: Sequence[Record],
    chosen: Mapping[str, Settings],
) -> list[str]:
    """Return the last three columns of a row: the prediction, the measurement, and what follows."""
    if not name:
        return ["–", "–", "a guess"]
    measure = MEASURES[name]
    by_seed = {
        cell: {
            run.seed: value
            for run in final
            if run.cell == cell and (value := measure.of(run, reward_scale(plan, cell, chosen))) is not None
        }
        for cell in (answer.b, answer.a)
    }
    b, a = by_seed[answer.b], by_seed[answer.a]
    values = list(b.values()) if bound_of(said) is not None else [b[s] - a[s] for s in sorted(b.keys() & a)]
    middle = mean(values)
    predicts = f"{measure.title}: {said}"
    if middle is None or middle.n < FEWEST_SEEDS:
        return [predicts, "not measured", OPEN]
    low, high = interval(middle)
    shown = [measure.form.format(value) for value in (middle.value, low, high)]
    return [predicts, f"{shown[0]} [{shown[1]}, {shown[2]}]", follows(said, middle)]


def follows(said: str, middle: Mean) -> str:
    """Return whether the interval of ``middle`` supports or excludes what was predicted of it."""
    low, high = interval(middle)
    bound = bound_of(said)
    edge = 0.0 if bound is None else bound
    if said == "higher":
        low, high, edge = -high, -low, -edge
    return SUPPORTED if high < edge else EXCLUDED if low > edge else OPEN


def bound_of(said: str) -> float | None:
    """Return X of ``below X``; None for ``lower`` and ``higher``."""
    return float(said.split()[1]) if said.startswith("below") else None
