"""The kinds of feedback that groups hold, and the losses that train on each kind, for advice when the chosen
loss learns nothing from the data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from data.types import Group
from data.views import varies

FITTING = {
    "prompts without answers": "online=true with a reward, as in reward=armorm",
    "single answers without labels (demonstrations)": "loss=sft",
    "single labelled completions": "loss=kto, or loss=bco",
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
        return "single labelled completions" if labelled else "single answers without labels (demonstrations)"
    if not varies(group.rewards):
        return "groups whose scores are all equal"
    return "pairs" if group.rewards == (1.0, -1.0) else "scored groups"


def advice(groups: Sequence[Group]) -> str:
    """Return a clause that says which kind the rows are and what trains on them; empty if there are no
    groups."""
    if not groups:
        return ""
    kind = kind_of(groups)
    return f"; rows are {kind}: {FITTING[kind]}"
