"""Selection of the examples of each step, and division of a global batch into ranks and microbatches.

Everything here is a pure function of (examples, seed, step, number of ranks). A run that resumes, also on
other ranks, sees the same global batches in the same order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from common.errors import ConfigError
from config.schema_model import ModelConfig
from data.balance import (
    TOKENS,
    Work,
    deal_together,
    in_slots,
    own_tokens,
    prompt_owners,
    row_tokens,
    share_tokens,
    within,
)
from data.examples import ExampleGroups, columns_of, longest
from data.types import Example, Microbatch, PackedRows, Sequence, Sequences

CANDIDATES = 32
"""Number of batches that are weighed to find the heaviest."""
FILL = Example(prompt_id="", rows=(Sequence(np.zeros(1, np.int32), np.zeros(0, np.int32)),))
"""Example that fills up a short batch, so that every rank runs the same number of forward passes. It has no
completion token, so it counts nowhere."""


@dataclass(frozen=True)
class Tokens:
    """A size of microbatches in tokens: at most ``most`` tokens each, in any number of examples."""

    most: int

    def __str__(self) -> str:
        return f"{self.most} tokens"


Size = int | Tokens
"""Maximum size of a microbatch: a number of examples, or a number of tokens."""


def size_of(model: ModelConfig, ranks: int) -> Size:
    """Return the maximum size of training microbatches."""
    if model.microbatch_tokens is not None:
        return Tokens(model.microbatch_tokens)
    return model.batch_size // (model.microbatches * ranks)


@dataclass(frozen=True)
class Segment:
    """A stretch of training whose batches are known in advance: all of offline training, or one round of
    online training.

    ``groups[g]`` are the examples of one group. Groups are shuffled, but their examples stay together (so KTO
    sees the same pairs in the same step as DPO). Epochs follow each other without a gap, so only the last
    batch may be short.
    """

    groups: ExampleGroups
    batch_size: int
    n_examples: int
    """Total number of examples trained on (n_epochs x the number that exists, or n_examples)."""
    seed: int
    index: int = 0
    start: float = 0.0
    end: float = 1.0
    """The share of the whole plan consumed before and after this segment (the schedule's clock)."""
    _orders: dict[int, tuple[np.ndarray, np.ndarray]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _last: dict[int, Seq[Example]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The group that was made last, which the next batch goes on with."""

    @property
    def steps(self) -> int:
        return -(-self.n_examples // self.batch_size)

    def batch(self, i: int) -> list[Example]:
        """Return the global batch of the segment's step ``i``, in its own order (before any sorting or
        splitting)."""
        first, last = i * self.batch_size, min((i + 1) * self.batch_size, self.n_examples)
        out: list[Example] = []
        while first < last:
            epoch, offset = divmod(first, self.epoch_size)
            out.extend(self._of_epoch(epoch, offset, offset + last - first))
            first = i * self.batch_size + len(out)
        return out

    def done(self, steps: int) -> float:
        """Return the share of the whole plan that earlier segments and the first ``steps`` of this one
        consume, in [0, 1]."""
        done = min(steps * self.batch_size, self.n_examples) / self.n_examples
        return self.start + (self.end - self.start) * done

    @cached_property
    def _sizes(self) -> np.ndarray:
        return columns_of(self.groups).sizes

    @cached_property
    def epoch_size(self) -> int:
        return int(self._sizes.sum())

    @cached_property
    def has_behavior(self) -> bool:
        """Whether any token has a known log-probability under the policy that wrote it."""
        return bool(columns_of(self.groups).behavior.any())

    def _of_epoch(self, epoch: int, first: int, last: int) -> list[Example]:
        """Return the examples [first, last) of an epoch, as many as it has. Only the examples of their groups
        are made."""
        if epoch not in self._orders:
            order = np.random.default_rng([self.seed, self.index, epoch]).permutation(len(self.groups))
            self._orders.clear()
            self._orders[epoch] = order, np.cumsum(self._sizes[order])
        order, ends = self._orders[epoch]
        at = int(np.searchsorted(ends, first, side="right"))
        begin = int(ends[at] - self._sizes[order[at]])
        out: list[Example] = []
        while at < len(order) and begin + len(out) < last:
            if (group := int(order[at])) not in self._last:
                self._last.clear()
                self._last[group] = self.groups[group]
            out.extend(self._last[group])
            at += 1
        return out[first - begin : last - begin]


def heaviest(segment: Segment, weight: Callable[[list[Example]], int]) -> list[Example]:
    """Return the segment's batch with the largest ``weight``. Only the CANDIDATES batches with the most
    tokens and those with the longest examples are weighed, so the result is a good guess."""
    real = bool(segment.groups[0][0].prompt_id)  # the placeholders for future rounds are all alike
    steps = range(segment.steps if real else 1)
    lengths = [[row_tokens(example) for example in segment.batch(i)] for i in steps]
    by_sum = heapq.nlargest(CANDIDATES, steps, key=lambda i: sum(lengths[i]))
    by_longest = heapq.nlargest(CANDIDATES, steps, key=lambda i: max(lengths[i]))
    batches = [segment.batch(i) for i in (*by_sum, *by_longest)]
    return max(([made_distinct(i, e) for i, e in enumerate(batch)] for batch in batches), key=weight)


def made_distinct(i: int, example: Example) -> Example:
    """Return a placeholder example made distinct from its neighbours; a real example is returned unchanged.

    The placeholder gets a prompt that it shares with no other example of the batch, and a label."""
    if example.prompt_id:
        return example
    rows = tuple(replace(row, prompt_ids=np.full_like(row.prompt_ids, i)) for row in example.rows)
    return replace(example, prompt_id=f"p{i}", rows=rows, label=1.0 - 2 * (i % 2))


def deal(
    batch: Seq[Example],
    ranks: int,
    size: Size,
    rows_per_example: int,
    packed: bool = True,
    shared: bool = False,
    work: Work = TOKENS,
) -> list[list[list[Example]]]:
    """Deal the global batch in slots: ``slots[t][r]`` are the examples, at most ``size``, that rank r
    computes in slot t. A rank that gets none has a row without a completion token.

    Rows that are ``packed`` are dealt so that the ranks of a slot have about as much to do by ``work``, with
    rank 0 most (data/balance.py). If their prompts are also ``shared``, examples of one prompt stay together
    as long as no rank waits for it. Rows that are padded are dealt by length instead, so
    that rows side by side are about equally long and little is padded. On one rank, where no rank waits, both
    kinds are dealt by length if ``size`` is a number of examples. Raises ValueError if a single example has
    more tokens than ``size``, which ``trainers.assembly.check_budget`` refuses before.
    """
    fits = isinstance(size, int) or max(map(row_tokens, batch)) <= size.most  # without sharing
    slots = _apart(batch, ranks, size, work) if packed and not (shared and (ranks == 1 or not fits)) else []
    if shared:
        by_tokens, most = (True, size.most) if isinstance(size, Tokens) else (False, size)
        slots = deal_together(batch, ranks, most, by_tokens, work if ranks > 1 else TOKENS, slots)
    elif not packed:
        slots = _padded(batch, ranks, size)
    has_mismatched = any(example.mismatched is not None for example in batch)
    fill = Example(
        prompt_id="", rows=FILL.rows * rows_per_example, mismatched=FILL.rows[0] if has_mismatched else None
    )
    return [[part or [fill] for part in slot] for slot in slots]


def _apart(batch: Seq[Example], ranks: int, size: Size, work: Work) -> list[list[list[Example]]]:
    """Deal packed rows example by example. A budget of tokens is one of rows with a gradient; mismatched
    rows, which keep nothing for backward, do not count."""
    tokens = [row_tokens(example) for example in batch]
    costs = tokens if ranks == 1 else [work.part([example]) for example in batch]
    if isinstance(size, Tokens):
        shares = within(costs, tokens, ranks, size.most)
    elif ranks == 1:
        return _slices(batch, ranks, size)
    else:
        shares = in_slots(costs, ranks, size)
    return [[[batch[i] for i in share] for share in slot] for slot in shares]


def _padded(batch: Seq[Example], ranks: int, size: Size) -> list[list[list[Example]]]:
    """Deal padded rows in slices of similar length, in as few slots as possible if ``size`` counts tokens,
    padding included. Mismatched rows, which keep nothing for backward, do not count."""
    if not isinstance(size, Tokens):
        return _slices(batch, ranks, size)
    slots = max(1, -(-sum(map(row_tokens, batch)) // (ranks * size.most)))
    while slots <= len(batch):
        dealt = _slices(batch, ranks, -(-len(batch) // (slots * ranks)))
        if max(share_tokens(share, packed=False) for slot in dealt for share in slot) <= size.most:
            return dealt
        slots += 1
    most = longest([tuple(batch)], packed=False)
    raise ConfigError(
        "model.microbatch_tokens",
        size.most,
        f"the example of prompt {most.prompt_id} has {share_tokens([most], packed=False)} tokens, its rows "
        "padded to the longest: allow as many",
    )


def _slices(batch: Seq[Example], ranks: int, size: int) -> list[list[list[Example]]]:
    """Return slices of the batch sorted by each example's longest row, [slot][rank]; the last may be
    empty."""
    by_length = sorted(batch, key=lambda e: -max(len(row) for row in e.rows))
    slots = -(-len(by_length) // (size * ranks))
    # Deal evenly: a batch of 5 in two slots of 4 is 3 + 2, not 4 + 1.
    size = -(-len(by_length) // (slots * ranks)) if slots else size
    firsts = [[(slot * ranks + rank) * size for rank in range(ranks)] for slot in range(slots)]
    return [[by_length[first : first + size] for first in slot_firsts] for slot_firsts in firsts]


def dealing(packed: bool, shared: bool = False, work: Work = TOKENS) -> str:
    """Return a description of how ``deal`` deals. Data kept on the rank that was dealt a row can be found
    again only with the same dealing."""
    if not packed:
        return "by length"
    return f"by {work}{', examples of a prompt together' * shared}"


def collate(rows: Seq[Sequence], device: torch.device, pack: bool = False, share: bool = False) -> Sequences:
    """Return rows on the device: a right-padded grid as wide as the longest row, or all rows end to end with
    restarting positions. With ``share`` (only for packed rows), a prompt that several rows have is included
    once, before the first of their completions, and the other rows are their completions alone."""
    owners = prompt_owners(rows) if share else list(range(len(rows)))
    lengths = own_tokens(rows) if share else [max(len(row), 1) for row in rows]
    width = max(lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]]) if pack else np.arange(len(rows)) * width
    flat = np.zeros(sum(lengths) if pack else len(rows) * width, np.int64)
    longest = max(max(len(row.counted) for row in rows), 1)
    predict, targets, cells, positions = [], [], [], []
    for r, (row, owner) in enumerate(zip(rows, owners, strict=True)):
        p, c = len(row.prompt_ids), len(row.completion_ids)
        start = offsets[r] + p if owner == r else offsets[r]  # where the completion starts
        flat[start : start + c] = row.completion_ids
        if owner == r:
            flat[offsets[r] : start] = row.prompt_ids
        # A token is predicted at the position before it, the first one at the end of the prompt.
        before = np.where(row.counted == 0, offsets[owner] + p, start + row.counted) - 1
        predict.append(before)
        targets.append(row.completion_ids[row.counted].astype(np.int64))
        cells.append(r * longest + np.arange(len(row.counted)))
        positions.append(np.arange(lengths[r]) + (0 if owner == r else p))
    mask = np.arange(longest)[None, :] < np.array([len(row.counted) for row in rows])[:, None]
    prompts = [
        (0, 0) if owner == r else (int(offsets[owner]), len(row.prompt_ids))
        for r, (row, owner) in enumerate(zip(rows, owners, strict=True))
    ]

    def put(array: np.ndarray) -> Tensor:
        return to_device(torch.from_numpy(np.ascontiguousarray(array)), device)

    return Sequences(
        rows=tuple(rows),
        input_ids=put(flat.reshape(1 if pack else len(rows), -1)),
        position_ids=put(np.concatenate(positions)[None, :]) if pack else None,
        packed=PackedRows(tuple(lengths), tuple(prompts)) if pack else None,
        predict=put(np.concatenate(predict)),
        targets=put(np.concatenate(targets)),
        cells=put(np.concatenate(cells)),
        mask=put(mask),
        behavior_logprobs=None if (logprobs := _behavior(rows, longest)) is None else put(logprobs),
    )


def _behavior(rows: Seq[Sequence], longest: int) -> np.ndarray | None:
    """Return the rows' log mu at the tokens that count, as [R, T], nan if unknown; None if no row has any."""
    if all(row.behavior_logprobs is None for row in rows):
        return None
    grid = np.full((len(rows), longest), np.nan, np.float32)
    for r, row in enumerate(rows):
        if row.behavior_logprobs is not None:
            grid[r, : len(row.counted)] = row.behavior_logprobs[row.counted]
    return grid


def microbatch(
    examples: Seq[Example], device: torch.device, pack: bool = False, share: bool = False
) -> Microbatch:
    """Return examples on the device, rows of pairs chosen first, with their mismatched rows if they have
    any."""
    width = max(len(example.rows) for example in examples)
    rows = [example.rows[k] for k in range(width) for example in examples]
    other = None
    if any(example.mismatched is not None for example in examples):
        other = collate([example.mismatched or FILL.rows[0] for example in examples], device, pack, share)
    numbers = None
    if columns := max(len(example.numbers) for example in examples):
        values = [example.numbers or (0.0,) * columns for example in examples]
        numbers = to_device(torch.tensor(values, dtype=torch.float32), device)
    labels = torch.tensor([example.label for example in examples], dtype=torch.float32)
    return Microbatch(
        examples=tuple(examples),
        sequences=collate(rows, device, pack, share),
        labels=to_device(labels, device),
        mismatched=other,
        numbers=numbers,
    )


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on the device. A GPU copies it in the background, and from pinned memory,
    since the host may wait for a copy from any other."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def token_count(batch: Seq[Example]) -> int:
    """Return the number of tokens in the batch's rows, prompts included."""
    return sum(len(row) for example in batch for row in example.rows)
