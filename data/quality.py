"""The data report, with what was read and left out, the lengths of the rows, and whether the data are good
enough.

The last part is the paper's test (§5.2.1, Figure 6). The mean token log-probability of an offline completion
under the initial reference predicts how well training on it will go. The quarter of the paper's data with the
lowest values trained clearly worse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from data.chat import CONTROLLED
from data.examples import Examples, columns_of
from data.group_store import prompt_ids
from data.rows import Dropped, Loaded, reasons
from data.selection import Selection, Spread

PAPER_WORST_QUARTILE = (-1.03, -0.36)
"""Range of mean token log-probabilities (nats) in the paper's lowest quarter of offline completions, under
the initial reference."""

LEAST_LIKELY = 0.1
"""Quantile of the model's own answers, by mean token log-probability, with which completions are compared."""
_NAMED = 10


@dataclass(frozen=True)
class DataReport:
    """The data that a run is about to train on. ``reports.data_tables`` shows what ``to_dict`` gives."""

    origin: str
    evaluation_origin: str
    read: int
    groups: int
    prompts: int
    """distinct prompts, by content"""
    evaluation_groups: int
    shared_prompts: int
    """prompts that are used both for training and for evaluation"""
    examples: int
    dropped: dict[str, int]
    """reason -> rows that could not be read or used (of the training data)"""
    named: tuple[Dropped, ...]
    """the first of the dropped rows"""
    untrainable: dict[str, int]
    """reason -> groups that gave no example"""
    cut: dict[str, int]
    """what was shortened to fit model.max_length and max_prompt_length, and how often"""
    prompt_tokens: Spread | None
    completion_tokens: Spread | None
    logprob: dict[str, Spread] = field(default_factory=dict)
    """"all" and each kind ("chosen", "rejected" …) -> mean token log-probability per completion under the
    initial reference, in nats"""
    poor_share: float | None = None
    """share of the completions that are less likely than nine in ten of the initial model's own answers, or,
    where it gave none, at most the upper end of the paper's lowest quarter"""
    own: Spread | None = None
    """mean token log-probability of the initial model's own answers to held-out prompts, nats"""
    clippable_share: float | None = None
    """share of completion tokens that humanline can clip from above while the reference is the initial model;
    this is an upper bound"""
    format: str = ""
    """the format that the rows were read as; "" if the source makes groups itself"""
    columns: tuple[str, ...] = ()
    """columns that the format read"""
    unused: tuple[str, ...] = ()
    """columns that the format did not read"""
    read_back: tuple[str, ...] = ()
    """what rendered texts were read back, in words"""
    example: tuple[str, ...] = ()
    """the first example as the model reads it: its prompt, then each of its completions"""
    labels: tuple[int, int] | None = None
    """how many examples are desirable and how many undesirable, of a loss that learns from such labels"""
    desirable_first: bool = False
    """whether the first of them is desirable"""
    selection: Selection | None = None
    """the groups that data.logprob_range kept; ``examples`` and the lengths then describe these groups, the
    counts of rows all groups"""

    @classmethod
    def of(
        cls,
        loaded: Loaded,
        evaluation: Loaded,
        examples: Examples,
        cut: Mapping[str, int],
        labelled: bool = False,
    ) -> DataReport:
        """Return the report before anything is scored. ``cut`` is ``Renderer.cuts``. ``labelled``: whether
        the loss learns from desirable and undesirable answers."""
        example_columns = columns_of(examples.groups)
        desirable = example_columns.labels > 0
        ids, held_out = prompt_ids(loaded.groups), prompt_ids(evaluation.groups)
        return cls(
            origin=loaded.origin,
            evaluation_origin=evaluation.origin,
            read=loaded.read,
            groups=len(loaded.groups),
            prompts=len(np.unique(ids)),
            evaluation_groups=len(evaluation.groups),
            shared_prompts=len(np.intersect1d(ids, held_out)),
            examples=examples.count,
            dropped=dict(Counter(row.reason for row in loaded.dropped).most_common()),
            named=tuple(loaded.dropped[:_NAMED]),
            untrainable=dict(examples.dropped),
            cut={what: n for what, n in cut.items() if n},
            format=loaded.format,
            columns=loaded.columns,
            unused=loaded.unused,
            read_back=loaded.read_back,
            labels=(int(desirable.sum()), int((~desirable).sum())) if labelled and desirable.size else None,
            desirable_first=bool(desirable[:1].all()),
            prompt_tokens=Spread.of(example_columns.prompts),
            completion_tokens=Spread.of(example_columns.completions),
        )

    def with_logprobs(
        self,
        kinds: Mapping[str, np.ndarray],
        clippable_share: float | None = None,
        own: Sequence[float] = (),
    ) -> DataReport:
        """Return the report with ``kinds``: "chosen", "rejected" … -> [completions] mean token
        log-probability under the initial reference, in nats.

        NaN stands for a completion that was not scored and is left out. For ``clippable_share`` see
        ``can_be_clipped``; it is None if nothing is clipped or nothing was scored. ``own``: the same mean of
        each answer that the initial model itself gave.
        """
        bar = float(np.quantile(own, LEAST_LIKELY)) if len(own) else PAPER_WORST_QUARTILE[1]
        scored = {kind: values[~np.isnan(values)] for kind, values in kinds.items()}
        everything = np.concatenate(list(scored.values())) if scored else np.empty(0)
        spreads = {kind: Spread.of(values) for kind, values in {"all": everything, **scored}.items()}
        return replace(
            self,
            logprob={kind: spread for kind, spread in spreads.items() if spread is not None},
            clippable_share=clippable_share,
            own=Spread.of(np.array(own)),
            poor_share=float((everything <= bar).mean()) if everything.size else None,
        )

    def with_example(self, shown: Sequence[str]) -> DataReport:
        """Return the report with an example: its prompt and its completions, as text of their tokens."""
        return replace(self, example=tuple(shown))

    def beginning(self) -> list[str]:
        """Return lines for the terminal, printed before training, that say how the data were understood."""
        lines = []
        if self.format:
            columns = f" ({', '.join(self.columns)})" if self.columns else ""
            reader = "only a reward function" if self.format == "prompt_only" else "nothing"
            unused = f"; columns that {reader} reads: {', '.join(self.unused)}" if self.unused else ""
            lines.append(f"data read as {self.format}{columns}{unused}")
        if self.dropped:
            lines.append(
                f"left out: {sum(self.dropped.values())} of {self.read} rows ({reasons(self.dropped)})"
            )
        lines += [f"read back: {line}" for line in self.read_back]
        if self.untrainable:
            lines.append(
                f"without an example: {sum(self.untrainable.values())} of {self.groups} groups "
                f"({reasons(self.untrainable)})"
            )
        if self.labels is not None:
            lines.append(
                f"labels: {self.labels[0]} answers desirable, {self.labels[1]} not; of a row with a reward "
                "one above 0 is"
            )
        answer = "completion"
        if self.labels is not None:
            answer = "desirable completion" if self.desirable_first else "undesirable completion"
        for what, text in zip(("prompt", *[answer] * len(self.example)), self.example, strict=False):
            lines.append(f"first example, {what}: {shortened(text)!r}")
        return lines

    def with_selection(self, selection: Selection, kept: Examples) -> DataReport:
        """Return the report with the examples and lengths of the groups that ``data.logprob_range`` kept."""
        example_columns = columns_of(kept.groups)
        return replace(
            self,
            selection=selection,
            examples=kept.count,
            prompt_tokens=Spread.of(example_columns.prompts),
            completion_tokens=Spread.of(example_columns.completions),
        )

    def warnings(self) -> list[str]:
        """Return warnings to check before spending GPU hours; empty if nothing stands out."""
        warnings = []
        if self.poor_share is not None and self.poor_share > 0.5:
            warnings.append(self._unlikely(self.poor_share))
        if self.shared_prompts:
            warnings.append(
                f"{self.shared_prompts} prompts are both trained on and evaluated with; evaluation numbers "
                "will flatter"
            )
        cut = self.cut.get("oldest turns", 0) + self.cut.get("last user turn", 0)
        if cut > 0.1 * max(self.prompts, 1):
            warnings.append(
                f"{cut} prompts lost their oldest turns or the beginning of their question; raise "
                "model.max_prompt_length, or leave them out with data.long_prompts=drop"
            )
        if controlled := self.cut.get(CONTROLLED, 0):
            warnings.append(
                f"{controlled} texts hold control tokens of the model, which act as such, as at inference; "
                "data.control_tokens=escape writes them as plain text, data.control_tokens=drop leaves such "
                "rows out"
            )
        if self.cut.get("completion end", 0) > 0.1 * max(self.examples, 1):
            warnings.append(
                f"{self.cut['completion end']} completions lost their end and end-of-turn token; raise "
                "model.max_length"
            )
        return warnings

    @property
    def _than(self) -> str:
        """What makes a completion one of ``poor_share``."""
        if self.own is None:
            high = PAPER_WORST_QUARTILE[1]
            return f"have a mean token log-probability of {high} nats or less under the initial model"
        return (
            "are less likely under the initial model than nine in ten of its own answers (median "
            f"{self.logprob['all'].median:.2f} nats a token; its own answers {self.own.median:.2f})"
        )

    def _unlikely(self, share: float) -> str:
        """Return the warning that most completions are ones that the initial model would hardly say."""
        low, high = PAPER_WORST_QUARTILE
        leave_out = (
            "" if self.selection else ", or data.logprob_range=[0.25,1] leaves the least likely quarter out"
        )
        return (
            f"{share:.0%} of the completions {self._than}. Such data, [{low}, {high}] nats in the paper, "
            "trained clearly worse than the rest even with humanline (§5.2.1, Figure 6): prefer completions "
            f"of this or a similar model, or online=true{leave_out}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        selection = None if self.selection is None else self.selection.to_dict()
        return {**asdict(self), "selection": selection, "warnings": self.warnings()}


def can_be_clipped(logprobs: np.ndarray, log_epsilon_R: float) -> np.ndarray:
    """Return [tokens] bool: True if the log-ratio against these reference log-probabilities (nats) can exceed
    ``log_epsilon_R``.

    Before training, the clipped tokens are unknown: the policy is the reference, and every log-ratio is 0.
    But a log-probability is at most 0, so a log-ratio is at most −log pi_ref, and a token at −log_epsilon_R
    or above can never be clipped from above. The share of the other tokens is an upper bound, and it is the
    part of clipping that depends on the data; from below, any token can be clipped. The bound holds only for
    this reference: after a sync, each later reference has a bound of its own.
    """
    return logprobs < -log_epsilon_R


_SHOWN = 300
"""Number of characters of a text that the terminal shows, from its beginning and its end."""


def shortened(text: str) -> str:
    """Return the text, without its middle if it is long."""
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} … {text[-_SHOWN // 2 :]}"
