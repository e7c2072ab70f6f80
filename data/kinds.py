"""The kinds of feedback that groups hold, and the losses that train on each kind, for advice when the chosen
loss learns nothing from the data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from common.errors import require
from config.schema import Config
from data.columns import proposal
from data.rows import Loaded
from data.sources import EARLY
from data.types import Group
from data.views import varies

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
    way = proposal([*first.columns, *first.unused], first.unused, config.data.columns)
    typing = f"; if a column says more, type {way}" if way else ""
    name = f"loss={config.loss['name']}"
    none = max(counts) == 0 or (max(counts) == 1 and not takes.single_answers)
    require(not none, "data.path", path, f"gives {name} no example{advice(first.groups)}{typing}")
    certain = whole or first.format != "unpaired"
    one = training and certain and takes.labelled_examples and not config.data.one_label and len(labels) == 1
    message = ONE_LABEL.format("" if True in labels else "un")
    require(not one, "data.path", path, f"gives {name} {message}{typing}")


def advice(groups: Sequence[Group]) -> str:
    """Return a clause that says which kind the rows are and what trains on them; empty if there are no
    groups."""
    if not groups:
        return ""
    kind = kind_of(groups)
    return f"; rows are {kind}: {FITTING[kind]}"
