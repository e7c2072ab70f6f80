"""The data report, with what was read and left out, the lengths of the rows, and whether the data are good
enough; and the selection of the groups that a run keeps (``data.logprob_range``).

Whether they are good enough is the paper's test (§5.2.1, Figure 6). The mean token log-probability of an
offline completion under the initial reference predicts how well training on it will go. The quarter of the
paper's data with the lowest values trained clearly worse: [0, 0.25] selects it, [0.25, 1] the rest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from common.errors import ConfigError, StoppedError
from config.schema import Config
from data.chat import CONTROLLED
from data.examples import Examples, columns_of
from data.rows import Dropped, Loaded, reasons
from data.sources import EARLY
from data.types import Group
from data.views import prompt_ids, varies

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAPER_WORST_QUARTILE = (-1.03, -0.36)
"""Range of mean token log-probabilities (nats) in the paper's lowest quarter of offline completions, under
the initial reference."""

LEAST_LIKELY = 0.1
"""Quantile of the model's own answers, by mean token log-probability, with which completions are compared."""
_NAMED = 10
_OF_LOADED = ("origin", "read", "format", "columns", "unused", "read_back")


@dataclass(frozen=True)
class Spread:
    """The distribution of a number over a set: minimum, quartiles, maximum and mean."""

    count: int
    mean: float
    minimum: float
    lower_quartile: float
    median: float
    upper_quartile: float
    maximum: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """Return the spread of ``values`` in float64 (quartiles interpolated linearly); None if there are no
        values."""
        array = np.fromiter(values, dtype=np.float64)
        if not array.size:
            return None
        quantiles = np.quantile(array, (0, 0.25, 0.5, 0.75, 1)).tolist()
        return cls(array.size, float(array.mean()), *quantiles)


@dataclass(frozen=True)
class Selection:
    """The groups that are trained on, and the numbers to report about the selection."""

    range: tuple[float, float]
    """data.logprob_range: shares of the groups in order of their mean token log-probability; 0 is the least
    likely"""
    kept: tuple[int, ...]
    """Indices of the kept groups, ascending, so that the data keep their order"""
    below: int
    """Groups left out because they are less likely"""
    above: int
    """Groups left out because they are more likely"""
    all: Spread
    """Mean token log-probability of every group in nats; its four quarters are Figure 6's quartiles"""
    lowest: float
    """Lowest mean token log-probability of the kept groups, in nats"""
    highest: float
    """Highest mean token log-probability of the kept groups, in nats"""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON. Of the kept groups only their number is included."""
        return {**asdict(self), "kept": len(self.kept)}


def places(count: int, share: Sequence[float]) -> tuple[int, int]:
    """Return the slice [first, last) of ``count`` groups in ascending order to which the range ``share``
    corresponds. Adjacent ranges share no group and leave none out between them."""
    first, last = (math.floor(end * count + 0.5) for end in share)
    return first, last


def select(values: np.ndarray, share: Sequence[float]) -> Selection:
    """Return the selection of groups by ``values`` [groups], their mean token log-probabilities in nats. Of
    equal values, the earlier group counts as less likely.

    Raises StoppedError if a value is not a finite number, because such a group has no place in the order.
    """
    if not np.isfinite(values).all():
        raise StoppedError(
            f"the initial weights give {int((~np.isfinite(values)).sum())} of {len(values)} training groups "
            "no finite log-probability, so data.logprob_range cannot order them; look at the model "
            "(model.dtype=float32?)"
        )
    first, last = places(len(values), share)
    order = np.argsort(values, kind="stable")
    kept = np.sort(order[first:last])
    spread = Spread.of(values)
    assert spread is not None and len(kept)  # make_plan checks it
    return Selection(
        (float(share[0]), float(share[1])),
        tuple(kept.tolist()),
        first,
        len(values) - last,
        spread,
        float(values[order[first]]),
        float(values[order[last - 1]]),
    )


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
        desirable = columns_of(examples.groups).labels > 0
        ids, held_out = prompt_ids(loaded.groups), prompt_ids(evaluation.groups)
        return cls(
            evaluation_origin=evaluation.origin,
            groups=len(loaded.groups),
            prompts=len(np.unique(ids)),
            evaluation_groups=len(evaluation.groups),
            shared_prompts=len(np.intersect1d(ids, held_out)),
            dropped=dict(Counter(row.reason for row in loaded.dropped).most_common()),
            named=tuple(loaded.dropped[:_NAMED]),
            untrainable=dict(examples.dropped),
            cut={what: n for what, n in cut.items() if n},
            **{name: getattr(loaded, name) for name in _OF_LOADED},
            labels=(int(desirable.sum()), int((~desirable).sum())) if labelled and desirable.size else None,
            desirable_first=bool(desirable[:1].all()),
            **_sizes(examples),
        )

    def with_logprobs(
        self, kinds: Mapping[str, np.ndarray], clippable_share: float | None = None, own: Sequence[float] = ()
    ) -> DataReport:
        """Return the report with ``kinds``: "chosen", "rejected" … -> [completions] mean token
        log-probability under the initial reference, in nats.

        NaN stands for a completion that was not scored and is left out. For ``clippable_share`` see
        ``jobs.initial_scores``; it is None if nothing is clipped or nothing was scored. ``own``: the same
        mean of each answer that the initial model itself gave.
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
        return replace(self, selection=selection, **_sizes(kept))

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
                "data.control_tokens=drop leaves such rows out"
            )
        if self.cut.get("completion end", 0) > 0.1 * max(self.examples, 1):
            warnings.append(
                f"{self.cut['completion end']} completions lost their end and end-of-turn token; raise "
                "model.max_length"
            )
        return warnings

    def _unlikely(self, share: float) -> str:
        """Return the warning that most completions are ones that the initial model would hardly say."""
        low, high = PAPER_WORST_QUARTILE
        if self.own is None:
            how = f"have a mean token log-probability of {high} nats or less under the initial model"
        else:
            how = (
                "are less likely under the initial model than nine in ten of its own answers (median "
                f"{self.logprob['all'].median:.2f} nats a token; its own answers {self.own.median:.2f})"
            )
        leave_out = (
            "" if self.selection else ", or data.logprob_range=[0.25,1] leaves the least likely quarter out"
        )
        return (
            f"{share:.0%} of the completions {how}. Such data, [{low}, {high}] nats in the paper, "
            "trained clearly worse than the rest even with humanline (§5.2.1, Figure 6): prefer completions "
            f"of this or a similar model, or online=true{leave_out}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        selection = None if self.selection is None else self.selection.to_dict()
        return {**asdict(self), "selection": selection, "warnings": self.warnings()}


def _sizes(examples: Examples) -> dict[str, Any]:
    columns = columns_of(examples.groups)
    prompts, completions = Spread.of(columns.prompts), Spread.of(columns.completions)
    return {"examples": examples.count, "prompt_tokens": prompts, "completion_tokens": completions}


_SHOWN = 300
"""Number of characters of a text that the terminal shows, from its beginning and its end."""


def shortened(text: str) -> str:
    """Return the text, without its middle if it is long."""
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} … {text[-_SHOWN // 2 :]}"


# The kinds of feedback that groups hold, and the losses that train on each


SINGLE = "single answers without labels (demonstrations)"
ONE_LABEL = (
    "{}desirable answers alone (no label, kto_tag or reward says otherwise); demonstrations are for "
    "loss=sft, and data.one_label=true trains on them all the same"
)
"""What is said of data whose labelled answers all have one label."""
FITTING = {
    "prompts without answers": "online=true with a reward, as in reward=armorm",
    SINGLE: "loss=sft",
    "single labelled completions": "loss=kto",
    "pairs": "loss=dpo, and every loss but those of scored groups of more answers",
    "scored groups": "loss=grpo, or loss=dpo on the best and the worst",
    "groups whose scores are all equal": "others: nobody can say which answer is better",
}
"""The kind of the rows -> what trains on them."""


def kind_of(groups: Sequence[Group]) -> str:
    """Return the most frequent kind of the groups, a key of FITTING."""
    labelled = any(len(group.rewards) == 1 and group.rewards[0] <= 0 for group in groups)
    return Counter(_kind(group, labelled) for group in groups).most_common(1)[0][0]


def _kind(group: Group, labelled: bool) -> str:
    if not group.rewards:
        return "prompts without answers"
    if len(group.rewards) == 1:
        return "single labelled completions" if labelled else SINGLE
    if not varies(group.rewards):
        return "groups whose scores are all equal"
    return "pairs" if group.rewards == (1.0, -1.0) else "scored groups"


GATHERED = ("scored", "feedback", "groups")
"""Formats of which a row alone does not show the kind of its group."""


def check_kind(config: Config, path: str, first: Loaded, training: bool = True) -> None:
    """Raise ConfigError where the ``first`` rows of the file ``path`` already show that offline training has
    no example in it, or (``training``) answers of one label alone."""
    whole = first.read < EARLY
    if not first.groups or not (whole or first.format not in GATHERED):
        return
    counts = Counter(len(group.completions) for group in first.groups)
    singles, takes = counts[1] == len(first.groups), config.accepts
    labels = {max(group.rewards, default=1) > 0 for group in first.groups} if singles else {True, False}
    none = max(counts) == 0 or (max(counts) == 1 and not takes.single_answers)
    certain = whole or first.format != "unpaired"
    one = training and certain and takes.labelled_examples and not config.data.one_label and len(labels) == 1
    if none or one:
        alike = ONE_LABEL.format("" if True in labels else "un")
        why = f"no example{advice(first.groups)}" if none else alike
        typing = f"; if a column says more, type {way}" if (way := first.propose(first.unused)) else ""
        raise ConfigError("data.path", path, f"gives loss={config.loss['name']} {why}{typing}")


def advice(groups: Sequence[Group]) -> str:
    """Return a clause that says which kind the rows are and what trains on them; empty if there are no
    groups."""
    if not groups:
        return ""
    kind = kind_of(groups)
    return f"; rows are {kind}: {FITTING[kind]}"


# Whether a tokenizer can read the data: what it does not know becomes one and the same token, of which a
# model learns nothing


MOST_UNKNOWN = 0.1
"""Share of unknown tokens above which data are refused. Texts in a language that the tokenizer was made for
have almost none."""


def limit_tokens(tokenizer: PreTrainedTokenizerBase, embedding: int, stops: Iterable[int]) -> None:
    """Let ``check_vocabulary`` refuse data with tokens for which a model whose embedding has ``embedding``
    rows has none. Some published tokenizers know such tokens, and no text has them. Raises ConfigError if one
    of ``stops``, which end an answer, is among them."""
    if max(tokenizer.get_vocab().values(), default=0) >= embedding:
        setattr(tokenizer, _LIMIT, embedding)
        check_vocabulary(tokenizer, [np.array([*stops])], "the tokens that end an answer")


_LIMIT = "embedding_rows"
"""Attribute of a tokenizer that knows more tokens than its model."""


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, rows: Iterable[np.ndarray], origin: str) -> None:
    """Raise ConfigError for data that the tokenizer cannot read, or whose tokens the model does not have
    (``limit_tokens``). ``origin`` describes the data in words."""
    key, name = "model.name_or_path", tokenizer.name_or_path
    if (limit := getattr(tokenizer, _LIMIT, None)) is not None:
        rows = list(rows)
        worst = max((int(ids.max()) for ids in rows if ids.size), default=0)
        why = (
            f"its embedding has {limit} rows, and {origin} have the token "
            f"{tokenizer.convert_ids_to_tokens(worst)!r}, whose id is {worst}: name the model's own "
            "tokenizer in model.tokenizer_name_or_path, or make the embedding larger "
            "(model.resize_token_embeddings(len(tokenizer)), then save_pretrained)"
        )
        if worst >= limit:
            raise ConfigError(key, name, why)
    unknown, count, total = tokenizer.unk_token_id, 0, 0
    others = ("eos_token_id", "bos_token_id", "pad_token_id")
    if unknown is None or unknown in (getattr(tokenizer, other) for other in others):
        return  # it has no separate token for what it does not know
    for ids in rows:
        count, total = count + int(np.count_nonzero(ids == unknown)), total + ids.size
    share = count / max(total, 1)
    why = (
        f"its tokenizer does not know {share:.1%} of the tokens of {origin}; choose a model that can read "
        "them, as in model=hub model.name_or_path=org/name"
    )
    if share > MOST_UNKNOWN:
        raise ConfigError(key, name, why)
