"""Conversion of a group into examples: pure functions, one for each kind of feedback. Trainers choose one and
add nothing to it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from statistics import fmean, pstdev

import numpy as np

from data.types import Example, Group, Prompt, Sequence


@dataclass(frozen=True)
class ExampleSpec:
    """The completions of a group (by index) that form one example, and its label."""

    completions: tuple[int, ...]
    label: float = 0.0


View = Callable[[Group], list[ExampleSpec]]
"""A function from a group to its examples. It gives none if the feedback is not informative (equal rewards,
too few completions)."""


ROUNDING = 1e-6
"""Rewards R within this times max(1, |R|) of one another are one value, because sums of the same parts in
another order differ by as much."""


def exceeds(better: float, worse: float, by: float = 0.0) -> bool:
    """Return whether one reward is above another, and by at least ``by``, beyond what ``ROUNDING`` explains.
    The one place that decides about variance and pairs."""
    rounding = ROUNDING * max(1.0, abs(better), abs(worse))
    return better - worse > rounding and better - worse >= by - rounding


def varies(rewards: Seq[float]) -> bool:
    """Return whether a group's rewards are more than one value. One reward is not, and neither is none."""
    return bool(rewards) and exceeds(max(rewards), min(rewards))


def _best(rewards: Seq[float]) -> int:
    """Return the index of the highest reward; of equal rewards the first is taken."""
    return next(i for i, reward in enumerate(rewards) if not exceeds(max(rewards), reward))


def best_and_worst(group: Group, threshold: float = 0.0) -> tuple[int, int] | None:
    """Return the indices of the highest- and lowest-rewarded completion, or None if the rewards differ by
    less than ``threshold`` or not at all (Algorithm 1, lines 8 and 9). Of equal rewards the first is taken,
    so a pair written chosen first keeps its order."""
    rewards = group.rewards
    if not rewards or not exceeds(max(rewards), min(rewards), threshold):
        return None
    return _best(rewards), _best([-reward for reward in rewards])


def pairs(group: Group) -> list[ExampleSpec]:
    """Return one (chosen, rejected) example: the best against the worst (DPO and its relatives)."""
    pair = best_and_worst(group)
    return [] if pair is None else [ExampleSpec(pair)]


def labelled(group: Group) -> list[ExampleSpec]:
    """Return desirable (+1) and undesirable (-1) examples (KTO, C.1.1): the two halves of the pair, or one
    completion by its sign."""
    if len(group.rewards) == 1:
        return [ExampleSpec((0,), 1.0 if group.rewards[0] > 0 else -1.0)]
    pair = best_and_worst(group)
    return [] if pair is None else [ExampleSpec((pair[0],), 1.0), ExampleSpec((pair[1],), -1.0)]


def scored(group: Group, keep_zero_variance: bool = True) -> list[ExampleSpec]:
    """Return every completion with its own score (PPO), of which a group needs no two different ones."""
    return [ExampleSpec((i,), float(reward)) for i, reward in enumerate(group.rewards)]


def keep_shares(groups: Seq[Group], desirable: float, undesirable: float) -> Iterator[Group]:
    """Yield the groups with only these shares of their desirable and undesirable examples (see ``labelled``).
    Prompt ids decide which rows are kept. A pair that loses one half becomes an unpaired example. A group
    without examples stays unchanged."""
    wanted = [
        {want.label: want.completions[0] for want in labelled(group)} if group.rewards else {}
        for group in groups
    ]
    kept: dict[float, set[int]] = {}
    for label, share in ((1.0, desirable), (-1.0, undesirable)):
        having = [i for i, want in enumerate(wanted) if label in want]
        # an order that depends neither on the rows' order nor on the draw for the other label
        names = {i: f"{label:+.0f}/{groups[i].prompt.id}".encode() for i in having}
        having.sort(key=lambda i: hashlib.sha256(names[i]).hexdigest())
        kept[label] = set(having[: round(share * len(having))])
    for i, (group, want) in enumerate(zip(groups, wanted, strict=True)):
        left = {label: completion for label, completion in want.items() if i in kept[label]}
        if len(left) == len(want):
            yield group
        elif left:
            answers = tuple(group.completions[completion] for completion in left.values())
            yield replace(group, completions=answers, rewards=tuple(left))


def advantages(rewards: Iterable[float], epsilon: float = 0.0) -> list[float]:
    """Return ``(R - mean R) / (std R + epsilon)`` within one prompt's group (eq. 1), with population std in
    float64. Without an epsilon, in units of the reward, a group of two gives exactly +-1. A group without
    variance gives zeros."""
    values = [float(r) for r in rewards]
    if not varies(values):
        return [0.0] * len(values)
    if len(values) == 2 and not epsilon:
        return [1.0, -1.0] if values[0] > values[1] else [-1.0, 1.0]
    mean, std = fmean(values), pstdev(values)
    return [(v - mean) / (std + epsilon) for v in values]


def group_advantages(
    group: Group, keep_zero_variance: bool = False, epsilon: float = 0.0
) -> list[ExampleSpec]:
    """Return every completion with its advantage (GRPO, Algorithm 2). A group without variance is left out,
    or kept with A = 0 (spec of the verifiable setting, where compared runs must take the same number of
    steps)."""
    if len(group.rewards) < 2 or not (varies(group.rewards) or keep_zero_variance):
        return []
    return [ExampleSpec((i,), a) for i, a in enumerate(advantages(group.rewards, epsilon))]


def centred_advantages(group: Group, keep_zero_variance: bool = False) -> list[ExampleSpec]:
    """Return the same as ``group_advantages``, but with the advantage ``R - mean R`` (Dr. GRPO), which is not
    divided by the std."""
    mean = fmean(group.rewards) if group.rewards else 0.0
    spread = varies(group.rewards)
    return [
        ExampleSpec(want.completions, group.rewards[want.completions[0]] - mean if spread else 0.0)
        for want in group_advantages(group, keep_zero_variance)
    ]


def leave_one_out_advantages(group: Group, keep_zero_variance: bool = False) -> list[ExampleSpec]:
    """Return the same as ``group_advantages``, but with the advantage ``R - mean of the group's other
    rewards`` (RLOO; Ahmadian et al. 2024, arXiv 2402.14740), which is ``n / (n - 1)`` times the centred
    one."""
    n = len(group.rewards)
    return [
        replace(want, label=want.label * n / (n - 1))
        for want in centred_advantages(group, keep_zero_variance)
    ]


ADVANTAGES: dict[str, View] = {
    "group": group_advantages,
    "group_mean": centred_advantages,
    "rloo": leave_one_out_advantages,
    "batch": centred_advantages,  # then ``normalised`` over the batch, which needs more than one group
}
"""Setting -> the view of a loss that uses advantages."""


def normalised(batch: list[Example]) -> list[Example]:
    """Return the batch with each label (an advantage) standardised: minus the mean, divided by the std over
    all completion tokens (REINFORCE++ with its group's baseline; Hu et al. 2025, arXiv 2501.03262). The std
    is the population std in float64, without epsilon. A batch whose labels are all the same gets zeros."""
    labels = [example.label for example in batch]
    if not varies(labels):
        return [replace(example, label=0.0) for example in batch]
    tokens = [sum(len(row.counted) for row in example.rows) for example in batch]
    mean = fmean(labels, tokens)
    std = fmean([(label - mean) ** 2 for label in labels], tokens) ** 0.5
    return [replace(example, label=(example.label - mean) / std) for example in batch]


def demonstrations(group: Group) -> list[ExampleSpec]:
    """Return the best completion alone (SFT)."""
    return [ExampleSpec((_best(group.rewards),), 1.0)] if group.rewards else []


def mismatched(batch: list[Example], max_length: int) -> list[Example]:
    """Return the batch in which each example has an extra row: its prompt with the completion of another
    prompt of the batch (KTO's z0, eq. 7).

    The pairing is a fixed rotation in the batch's own order, by the smallest shift under which no row meets a
    completion of its own prompt, so the two halves of a split pair never meet. If repeated prompts leave no
    such shift, each row takes the next completion of another prompt. Rows are truncated to ``max_length``
    tokens like any other. If the batch has only one prompt, nothing can be mismatched, and the examples are
    returned unchanged.
    """
    n = len(batch)
    prompts = [example.prompt_id for example in batch]
    if len(set(prompts)) < 2:
        return batch
    shift = next((s for s in range(1, n) if all(prompts[i] != prompts[(i + s) % n] for i in range(n))), None)
    paired = []
    for i, example in enumerate(batch):
        others = (k % n for k in range(i + 1, i + n) if prompts[k % n] != prompts[i])
        j = (i + shift) % n if shift else next(others)
        prompt_ids = example.rows[0].prompt_ids
        other, room = batch[j].rows[0], max_length - len(prompt_ids)
        mask = None if other.loss_mask is None else other.loss_mask[:room]
        row = Sequence(prompt_ids, other.completion_ids[:room], loss_mask=mask)
        paired.append(replace(example, mismatched=row))
    return paired


def prompt_ids(groups: Seq[Group]) -> np.ndarray:
    """Return the id of each group's prompt, [groups] S16."""
    return np.fromiter((group.prompt.id for group in groups), "S16")


def prompts_of(groups: Iterable[Group]) -> list[Prompt]:
    """Return the distinct prompts as they came first, in that order; a reference answer that only a later one
    has is kept."""
    first: dict[str, Prompt] = {}
    for prompt in (group.prompt for group in groups):
        kept = first.setdefault(prompt.id, prompt)
        if kept.reference_answer is None and prompt.reference_answer is not None:
            first[prompt.id] = replace(kept, reference_answer=prompt.reference_answer)
    return list(first.values())
