"""Examples that are made on demand, from columns of the numbers that define them and the places of their rows
in a table of rows."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import overload

import numpy as np

from data.balance import row_tokens
from data.token_rows import Rendered, TokenRows
from data.types import Completion, Example, Group, Prompt, Sequence, row_key
from data.views import View

ExampleGroups = Seq[tuple[Example, ...]]
"""The examples of each group."""


def with_behavior(row: Sequence | str, completion: Completion) -> Sequence | str:
    """Return the row with the log-probabilities that the policy which wrote its tokens gave them. An end
    token that the renderer added to the row has none."""
    if completion.behavior_logprobs is None or isinstance(row, str):
        return row
    known = completion.behavior_logprobs[: len(row.completion_ids)]
    found = np.full(len(row.completion_ids), np.nan, np.float32)
    found[: len(known)] = known
    return replace(row, behavior_logprobs=found)


def with_tokens(row: Sequence | str, completion: Completion) -> Sequence | str:
    """Return the row with what is known about each of its tokens: log mu, whether it counts, its reward; or
    the reason why it cannot be trained on. An end token that the renderer added counts and has reward 0."""
    row = with_behavior(row, completion)
    if isinstance(row, str):
        return row
    size = len(row.completion_ids)
    if completion.token_rewards is not None:
        rewards = np.zeros(size, np.float32)
        rewards[: len(completion.token_rewards)] = completion.token_rewards[:size]
        row = replace(row, token_rewards=rewards)
    if completion.loss_mask is not None and not all(completion.loss_mask):
        mask = np.ones(size, bool)
        mask[: len(completion.loss_mask)] = completion.loss_mask[:size]
        row = replace(row, loss_mask=mask) if mask.any() else "its loss_mask leaves no token to train on"
    return row


_MORE, _BEHAVIOR = 1, 2
_AT_ONCE = 1 << 16
"""Rows whose places are looked up together."""


def _flags(completion: Completion) -> int:
    """Return _MORE if ``with_tokens`` adds anything to the completion's row, and also _BEHAVIOR if it adds
    log mu."""
    if completion.behavior_logprobs is not None:
        return _MORE | _BEHAVIOR
    return _MORE * (completion.token_rewards is not None or completion.loss_mask is not None)


class Wanted(Collection[tuple[Prompt, Completion]]):
    """The rows that a view selects from groups, in columns. Iteration gives (prompt, completion) of every
    row, read from the groups again."""

    def __init__(self, groups: Seq[Group], view: View) -> None:
        ends, row_ends, labels = array("q"), array("q"), array("d")
        completions, flags = array("i"), array("b")
        prompt_ids, numbers = bytearray(), array("d")
        for group in groups:
            numbers.extend(group.numbers)
            prompt_ids += group.prompt.id.encode()
            for want in view(group):
                labels.append(want.label)
                completions.extend(want.completions)
                flags.extend(_flags(group.completions[i]) for i in want.completions)
                row_ends.append(len(completions))
            ends.append(len(labels))
        self.groups: Seq[Group] = groups
        self.numbers = np.array(numbers).reshape(len(ends), -1) if numbers else np.empty((len(ends), 0))
        """[groups, columns] float64: ``Group.numbers``"""
        self.prompt_ids = np.frombuffer(bytes(prompt_ids), "S16")
        self.ends, self.row_ends = np.array(ends), np.array(row_ends)
        """[groups], [examples] int64: the number of examples, and of rows, up to and including each"""
        self.labels, self.completions, self.flags = np.array(labels), np.array(completions), np.array(flags)
        """[examples] float64; [rows] int32: the index of the completion in its group; [rows] int8"""
        self.last_rows = np.append(0, self.row_ends)[self.ends]
        self.first_rows = np.append(0, self.last_rows)[:-1]
        """[groups] int64: the row after the last row of each group, and its first row"""

    def __len__(self) -> int:
        return len(self.completions)

    def __contains__(self, row: object) -> bool:
        return any(row == own for own in self)

    def __iter__(self) -> Iterator[tuple[Prompt, Completion]]:
        for group, first, last in zip(self.groups, self.first_rows, self.last_rows, strict=True):
            for place in self.completions[first:last].tolist():
                yield group.prompt, group.completions[place]

    def completion(self, row: int) -> Completion:
        """Return the completion of a row, read from its group."""
        return self.groups[self.group(row)].completions[int(self.completions[row])]

    def group(self, row: int) -> int:
        """Return the group of a row."""
        return int(np.searchsorted(self.last_rows, row, side="right"))


class ExampleTable(Seq[tuple[Example, ...]]):
    """The examples of groups. If the rows are in a file, the table takes only about 100 bytes of memory per
    example. What a file of token ids does not hold (log mu, masks, token rewards) is read from the groups."""

    def __init__(self, wanted: Wanted, rows: Rendered, kept: np.ndarray) -> None:
        """``rows`` are the rows of ``wanted``; a list already includes what ``with_tokens`` adds. ``kept``,
        [n] int64, selects the groups of ``wanted``."""
        self._wanted, self._rows, self._kept = wanted, rows, kept
        self._starts = np.append(0, wanted.ends)[:-1]

    def __len__(self) -> int:
        return len(self._kept)

    @overload
    def __getitem__(self, at: int) -> tuple[Example, ...]: ...

    @overload
    def __getitem__(self, at: slice) -> ExampleGroups: ...

    def __getitem__(self, at: int | slice) -> tuple[Example, ...] | ExampleGroups:
        if isinstance(at, slice):
            return self.pick(np.arange(len(self))[at])
        group = int(self._kept[at])
        prompt_id = self._wanted.prompt_ids[group].decode()
        numbers = tuple(self._wanted.numbers[group].tolist())
        return tuple(
            Example(prompt_id, tuple(self._row(r) for r in self._places(example)), label, numbers=numbers)
            for example, label in self._of_group(group)
        )

    def __iter__(self) -> Iterator[tuple[Example, ...]]:
        return (self[g] for g in range(len(self)))

    def pick(self, indices: np.ndarray) -> ExampleTable:
        """Return the groups at ``indices`` ([n] int64), in that order."""
        return ExampleTable(self._wanted, self._rows, self._kept[indices])

    @property
    def has_token_values(self) -> bool:
        """Whether anything is known of the tokens of any row (log mu, masks, token rewards)."""
        return bool(self._wanted.flags.any())

    @property
    def sizes(self) -> np.ndarray:
        """[groups] int64: the number of examples of each group."""
        return self._wanted.ends[self._kept] - self._starts[self._kept]

    @property
    def has_behavior(self) -> bool:
        """Whether log mu of any row is known."""
        return bool((self._wanted.flags[self._row_places()] & _BEHAVIOR).any())

    def row_lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Return [rows], [rows]: the prompt and completion tokens of every row, in order."""
        prompts, completions = self._all_lengths()
        places = self._row_places()
        return prompts[places], completions[places]

    def labels(self) -> np.ndarray:
        """Return [examples] float64: the label of every example, in order."""
        return self._wanted.labels[_ranges(self._starts[self._kept], self._wanted.ends[self._kept])]

    def row_arrays(self) -> Iterator[np.ndarray]:
        """Yield the token ids of every row and, if not all of them count, its mask, in order."""
        for of, place, begin, prompt, start, size, more in self._places_of_tokens():
            if begin + prompt != start:  # the prompt is an earlier row's too
                yield of.tokens[begin : begin + prompt]
                begin = start
            yield of.tokens[begin : start + size]
            if more and (mask := self._row(place).loss_mask) is not None:
                yield mask

    def row_signs(self) -> np.ndarray:
        """Return [rows] float64: 1 and -1 for the rows of a pair, the example's label for any other row."""
        examples = _ranges(self._starts[self._kept], self._wanted.ends[self._kept])
        sizes = np.diff(self._wanted.row_ends, prepend=0)[examples]
        signs = np.repeat(self._wanted.labels[examples], sizes)
        firsts = (np.cumsum(sizes) - sizes)[sizes == 2]
        signs[firsts], signs[firsts + 1] = 1.0, -1.0
        return signs

    def token_ids(self) -> Iterator[np.ndarray]:
        """Yield the token ids of every row, many at once: its prompt's, also one that is an earlier row's
        too, and its completion's."""
        assert isinstance(self._rows, TokenRows), "rows in memory are held as examples"
        of, places = self._rows, self._row_places()
        for first in range(0, len(places), _AT_ONCE >> 6):
            part = places[first : first + (_AT_ONCE >> 6)]
            for start, size in ((of.prompt_starts, of.prompt_sizes), (of.starts, of.sizes)):
                yield of.tokens[_ranges(start[part], start[part] + size[part])]

    def row_keys(self) -> Iterator[str]:
        """Yield ``Sequence.key`` of every row, in order."""
        for of, place, begin, prompt, start, size, more in self._places_of_tokens():
            if more:  # it may have a mask
                yield self._row(place).key
                continue
            ids = of.tokens[begin : begin + prompt].tobytes(), of.tokens[start : start + size].tobytes()
            yield row_key(*ids)

    def _places_of_tokens(self) -> Iterator[tuple[TokenRows, int, int, int, int, int, bool]]:
        """Yield of every row, in order: (whose tokens it refers to, its place among them, the prompt's start
        and size, the completion's start and size, whether it has more than tokens)."""
        assert isinstance(self._rows, TokenRows), "rows in memory are held as examples"
        of, places = self._rows, self._row_places()
        for first in range(0, len(places), _AT_ONCE):
            part = places[first : first + _AT_ONCE]
            columns = (of.prompt_starts, of.prompt_sizes, of.starts, of.sizes, self._wanted.flags)
            for row in zip(part.tolist(), *(column[part].tolist() for column in columns), strict=True):
                yield of, *row

    def longest(self) -> Example:
        """Return the first of the examples with most tokens."""
        examples = _ranges(self._starts[self._kept], self._wanted.ends[self._kept])
        total = np.append(0, np.cumsum(np.add(*self._all_lengths(), dtype=np.int64)))
        ends = self._wanted.row_ends
        tokens = total[ends[examples]] - total[np.append(0, ends)[examples]]
        most = int(tokens.argmax())
        group = int(np.searchsorted(np.cumsum(self.sizes), most, side="right"))
        return self[group][int(examples[most] - self._starts[self._kept[group]])]

    def _of_group(self, group: int) -> Iterator[tuple[int, float]]:
        """Yield (number, label) of each example of a group of ``wanted``."""
        first, last = int(self._starts[group]), int(self._wanted.ends[group])
        return zip(range(first, last), self._wanted.labels[first:last].tolist(), strict=True)

    def _places(self, example: int) -> range:
        ends = self._wanted.row_ends
        return range(int(ends[example - 1]) if example else 0, int(ends[example]))

    def _row(self, place: int) -> Sequence:
        row = self._rows[place]
        if self._wanted.flags[place] and isinstance(self._rows, TokenRows):
            row = with_tokens(row, self._wanted.completion(place))
        assert isinstance(row, Sequence), "a group with a row that cannot be trained on is not kept"
        return row

    def _row_places(self) -> np.ndarray:
        return _ranges(self._wanted.first_rows[self._kept], self._wanted.last_rows[self._kept])

    def _all_lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the prompt and completion tokens of every row of ``wanted``; 0 for one that cannot be
        trained on."""
        assert isinstance(self._rows, TokenRows), "rows in memory are held as examples"
        return self._rows.prompt_sizes, np.maximum(self._rows.sizes, 0)


def _ranges(first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Return first[0] … last[0] - 1, first[1] … last[1] - 1, and so on."""
    sizes = last - first
    before = np.append(0, np.cumsum(sizes))
    return np.repeat(first - before[:-1], sizes) + np.arange(before[-1])


def sizes_of(groups: ExampleGroups) -> np.ndarray:
    """Return the number of examples of each group, [groups] int64."""
    if isinstance(groups, ExampleTable):
        return groups.sizes
    return np.array([len(group) for group in groups], np.int64)


def row_lengths(groups: ExampleGroups) -> tuple[np.ndarray, np.ndarray]:
    """Return [rows], [rows]: the prompt and completion tokens of every row, in order."""
    if isinstance(groups, ExampleTable):
        return groups.row_lengths()
    rows = [row for group in groups for example in group for row in example.rows]
    return (
        np.array([len(row.prompt_ids) for row in rows], np.int64),
        np.array([len(row.completion_ids) for row in rows], np.int64),
    )


def labels_of(groups: ExampleGroups) -> np.ndarray:
    """Return the label of every example, [examples] float64, in order."""
    if isinstance(groups, ExampleTable):
        return groups.labels()
    return np.array([example.label for group in groups for example in group], np.float64)


def row_arrays(groups: ExampleGroups) -> Iterator[np.ndarray]:
    """Yield the token ids of every row (int32, in one array or in several) and, if not all of its
    completion's count, the mask [C] bool, in order."""
    if isinstance(groups, ExampleTable):
        yield from groups.row_arrays()
        return
    for row in (row for group in groups for example in group for row in example.rows):
        yield np.ascontiguousarray(row.prompt_ids, np.int32)
        yield np.ascontiguousarray(row.completion_ids, np.int32)
        if row.loss_mask is not None:
            yield np.ascontiguousarray(row.loss_mask, bool)


def token_ids(groups: ExampleGroups) -> Iterator[np.ndarray]:
    """Yield the token ids of every row, prompt and completion, in any number of arrays."""
    if isinstance(groups, ExampleTable):
        yield from groups.token_ids()
        return
    for row in (row for group in groups for example in group for row in example.rows):
        yield from (row.prompt_ids, row.completion_ids)


def row_keys(groups: ExampleGroups) -> np.ndarray:
    """Return ``Sequence.key`` of every row, [rows] of dtype S32, in order."""
    if isinstance(groups, ExampleTable):
        return np.fromiter((key.encode() for key in groups.row_keys()), "S32")
    rows = (row for group in groups for example in group for row in example.rows)
    return np.fromiter((row.key.encode() for row in rows), "S32")


def row_signs(groups: ExampleGroups) -> np.ndarray:
    """Return [rows] float64: 1 and -1 for the rows of a pair, the example's label for the row of any other
    example, in order."""
    if isinstance(groups, ExampleTable):
        return groups.row_signs()
    examples = (example for group in groups for example in group)
    signs = ((1.0, -1.0) if len(example.rows) == 2 else (example.label,) for example in examples)
    return np.array([sign for of in signs for sign in of], np.float64)


def longest(groups: ExampleGroups) -> Example:
    """Return the first of the examples with most tokens."""
    if isinstance(groups, ExampleTable):
        return groups.longest()
    return max((example for group in groups for example in group), key=row_tokens)


def has_behavior(groups: ExampleGroups) -> bool:
    """Return whether any token has a known log-probability under the policy that wrote it."""
    if isinstance(groups, ExampleTable):
        return groups.has_behavior
    rows = (row for group in groups for example in group for row in example.rows)
    return any(row.behavior_logprobs is not None for row in rows)


def picked_groups(groups: ExampleGroups, indices: np.ndarray) -> ExampleGroups:
    """Return the groups at ``indices`` ([n] int64), in that order."""
    return groups.pick(indices) if isinstance(groups, ExampleTable) else [groups[i] for i in indices]
