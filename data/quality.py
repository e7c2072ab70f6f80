"""The data report: what was read, what was left out and why, how long the rows are, and whether the data are good enough.

The last is the paper's test (§5.2.1, Figure 6): the mean token log-probability of an offline completion under the initial reference
predicts how well training on it will go, and the quarter of its data where that was lowest trained clearly worse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from data.examples import Examples
from data.rows import Dropped, Loaded
from data.types import Group

PAPER_WORST_QUARTILE = (-1.03, -0.36)
"""Mean token log-probability (nats) of the paper's lowest quarter of offline completions, under the initial reference."""

_NAMED = 10


@dataclass(frozen=True)
class Spread:
    """How a number is spread over a set: the ends of its four quarters, and the mean."""

    count: int
    mean: float
    minimum: float
    lower_quartile: float
    median: float
    upper_quartile: float
    maximum: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """The spread of ``values`` in float64 (quartiles interpolated linearly); None of no values."""
        array = np.fromiter(values, dtype=np.float64)
        if not array.size:
            return None
        return cls(array.size, float(array.mean()), *(float(q) for q in np.quantile(array, (0, 0.25, 0.5, 0.75, 1))))


@dataclass(frozen=True)
class DataReport:
    """What a run is about to train on. ``to_markdown`` for people, ``to_dict`` for JSON."""

    origin: str
    evaluation_origin: str
    read: int
    groups: int
    prompts: int
    """distinct prompts, by content"""
    evaluation_groups: int
    shared_prompts: int
    """prompts that are both trained on and evaluated with"""
    examples: int
    dropped: dict[str, int]
    """reason -> rows that could not be read or used (of the training data)"""
    named: tuple[Dropped, ...]
    """the first of those rows"""
    untrainable: dict[str, int]
    """reason -> groups that gave no example"""
    cut: dict[str, int]
    """what was shortened to fit model.max_length and max_prompt_length, and how often"""
    prompt_tokens: Spread | None
    completion_tokens: Spread | None
    logprob: dict[str, Spread] = field(default_factory=dict)
    """"all" and each kind ("chosen", "rejected" …) -> mean token log-probability a completion, initial reference, nats"""
    poor_share: float | None = None
    """share of the completions whose mean token log-probability lies where the paper's lowest quarter does, or below"""
    clipped_share: float | None = None
    """share of completion tokens that humanline is expected to clip"""

    @classmethod
    def of(cls, loaded: Loaded, evaluation: Loaded, examples: Examples, cut: Mapping[str, int]) -> DataReport:
        """The report before anything is scored. ``cut`` is ``Renderer.cuts``."""
        rows = [row for group in examples.groups for example in group for row in example.rows]
        return cls(
            origin=loaded.origin, evaluation_origin=evaluation.origin, read=loaded.read, groups=len(loaded.groups),
            prompts=len(_prompts(loaded.groups)), evaluation_groups=len(evaluation.groups),
            shared_prompts=len(_prompts(loaded.groups) & _prompts(evaluation.groups)), examples=examples.count,
            dropped=dict(Counter(row.reason for row in loaded.dropped).most_common()), named=tuple(loaded.dropped[:_NAMED]),
            untrainable=dict(examples.dropped), cut={what: n for what, n in cut.items() if n},
            prompt_tokens=Spread.of(len(row.prompt_ids) for row in rows),
            completion_tokens=Spread.of(len(row.completion_ids) for row in rows),
        )

    def with_logprobs(self, kinds: Mapping[str, np.ndarray], clipped_share: float | None = None) -> DataReport:
        """The report with ``kinds``: "chosen", "rejected" … -> [completions] mean token log-probability, initial reference, nats.

        NaN stands for a completion that was not scored and is left out.
        """
        scored = {kind: values[~np.isnan(values)] for kind, values in kinds.items()}
        everything = np.concatenate(list(scored.values())) if scored else np.empty(0)
        spreads = {kind: Spread.of(values) for kind, values in {"all": everything, **scored}.items()}
        return replace(
            self, logprob={kind: spread for kind, spread in spreads.items() if spread is not None}, clipped_share=clipped_share,
            poor_share=float((everything <= PAPER_WORST_QUARTILE[1]).mean()) if everything.size else None,
        )

    def warnings(self) -> list[str]:
        """What a person should look at before spending GPU hours; empty when nothing stands out."""
        found = []
        if self.poor_share is not None and self.poor_share > 0.5:
            low, high = PAPER_WORST_QUARTILE
            found.append(
                f"{self.poor_share:.0%} of the completions have a mean token log-probability of {high} nats or less under the "
                "initial model, which would hardly say them. So had the lowest quarter of the paper's data, "
                f"[{low}, {high}], which trained clearly worse than the rest even with humanline (§5.2.1, Figure 6). Expect many "
                "clipped tokens; prefer completions of this or a similar model, or online=true")
        if self.shared_prompts:
            found.append(f"{self.shared_prompts} prompts are both trained on and evaluated with; evaluation numbers will flatter")
        lost = sum(self.dropped.values())
        if lost > 0.1 * self.read:
            found.append(f"{lost} of {self.read} rows were dropped; the reasons stand above")
        if self.cut.get("completion end", 0) > 0.1 * max(self.examples, 1):
            found.append(f"{self.cut['completion end']} completions lost their end and end-of-turn token; raise model.max_length")
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "warnings": self.warnings()}

    def to_markdown(self) -> str:
        """The report as a page, headings from level 2 on."""
        parts = [
            "## Data", "",
            f"- Training: {self.origin}", f"- Evaluation: {self.evaluation_origin} ({self.evaluation_groups} groups)", "",
            f"{self.read} rows read, {self.groups} groups of {self.prompts} prompts, {self.examples} examples.", "",
            *_counts("Rows dropped", "rows", self.dropped),
            *(f"- {row.file}, row {row.row}: {row.reason}" for row in self.named), *([""] if self.named else []),
            *_counts("Groups without an example", "groups", self.untrainable),
            *_counts("Shortened", "times", self.cut),
            *_spreads("Lengths", "tokens", {"prompt": self.prompt_tokens, "completion": self.completion_tokens}, ".0f"),
        ]
        if self.logprob:
            parts += _spreads("Mean token log-probability under the initial model", "nats", self.logprob, ".3f")
            low, high = PAPER_WORST_QUARTILE
            parts += [f"{self.poor_share:.0%} of the completions lie at {high} or below; in the paper's data the lowest quarter "
                      f"did, [{low}, {high}] (§5.2.1, Figure 6).", ""]
        if self.clipped_share is not None:
            parts += [f"Humanline is expected to clip {self.clipped_share:.1%} of the completion tokens.", ""]
        parts += [f"**Warning.** {warning}.\n" for warning in self.warnings()]
        return "\n".join(parts)


def _prompts(groups: Iterable[Group]) -> set[str]:
    return {group.prompt.id for group in groups}


def _counts(title: str, unit: str, counts: Mapping[str, int]) -> list[str]:
    if not counts:
        return []
    return [f"### {title}", "", f"| reason | {unit} |", "|---|---|", *(f"| {_cell(why)} | {n} |" for why, n in counts.items()), ""]


def _spreads(title: str, unit: str, spreads: Mapping[str, Spread | None], form: str) -> list[str]:
    lines = [f"### {title}", "", f"| {unit} | count | mean | minimum | 25 % | median | 75 % | maximum |", "|" + "---|" * 8]
    for name, s in spreads.items():
        if s is not None:
            numbers = (s.mean, s.minimum, s.lower_quartile, s.median, s.upper_quartile, s.maximum)
            lines.append(f"| {name} | {s.count} | " + " | ".join(format(number, form) for number in numbers) + " |")
    return [*lines, ""]


def _cell(text: str) -> str:
    """Text that cannot break out of a table cell: reasons quote the data."""
    return " ".join(text.split()).replace("|", "\\|")
