"""Conversion of groups into tokenised examples by a view and the renderer. Groups that cannot be trained on
are counted and named.

The examples of many groups are made when they are asked for, from columns of numbers and tokenised rows in a
file (``data.token_cache``).
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from common.progress import SOON, progress
from data.chat import Renderer
from data.token_cache import Rows, TokenCache, TokenFile
from data.types import Completion, Example, Group, Prompt, Sequence
from data.views import View

ExampleGroups = Seq[tuple[Example, ...]]
"""The examples of each group."""
SAYS_NOTHING = "its rewards say nothing (too few completions, or all equal)"
_MADE_EQUAL = "its two answers are the same once cut to model.max_length"
_AT_ONCE = 1_024
"""Rows that are tokenised together: enough to occupy all cores. These rows are in memory meanwhile."""


def ranges(first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Return first[0] … last[0] - 1, first[1] … last[1] - 1, and so on."""
    sizes = last - first
    before = np.append(0, np.cumsum(sizes))
    return np.repeat(first - before[:-1], sizes) + np.arange(before[-1])


@dataclass(frozen=True)
class Columns:
    """Numbers of the examples of groups, in order."""

    sizes: np.ndarray
    """[groups] int32: examples"""
    counts: np.ndarray
    """[examples] int32: rows"""
    labels: np.ndarray
    """[examples] float64"""
    prompts: np.ndarray
    """[rows] int32: prompt tokens"""
    completions: np.ndarray
    """[rows] int32: completion tokens"""
    behavior: np.ndarray
    """[rows] bool: whether log mu is known"""

    def pick(self, groups: np.ndarray) -> Columns:
        """Return those of the groups at these indices ([n] int64), in that order."""
        starts, first_rows = (np.append(0, np.cumsum(column)) for column in (self.sizes, self.counts))
        examples = ranges(starts[groups], starts[groups + 1])
        rows = ranges(first_rows[examples], first_rows[examples + 1])
        return Columns(
            self.sizes[groups],
            *(column[examples] for column in (self.counts, self.labels)),
            *(column[rows] for column in (self.prompts, self.completions, self.behavior)),
        )

    @property
    def signs(self) -> np.ndarray:
        """[rows] float64: 1 and -1 for the rows of a pair, the example's label for the row of any other."""
        signs = np.repeat(self.labels, self.counts)
        firsts = (np.cumsum(self.counts) - self.counts)[self.counts == 2]
        signs[firsts], signs[firsts + 1] = 1.0, -1.0
        return signs


class ExampleTable(Seq[tuple[Example, ...]]):
    """The examples of groups whose rows are in a file. They take about 70 bytes of memory each."""

    def __init__(
        self,
        file: TokenFile,
        columns: Columns,
        groups: np.ndarray,
        prompt_ids: np.ndarray,
        numbers: np.ndarray,
    ) -> None:
        """``groups``: [n] int64, which groups of the file these are; ``prompt_ids``: [n] S16; ``numbers``:
        [n, columns] float64, ``Group.numbers``"""
        self.file, self.columns, self._groups, self._prompt_ids = file, columns, groups, prompt_ids
        self._numbers = numbers
        self._ends = np.cumsum(columns.sizes)

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return self.pick(np.arange(len(self))[at])
        block, group = self.file.place(int(self._groups[at]))
        end = int(self._ends[at])
        span = slice(end - int(self.columns.sizes[at]), end)
        return examples_of(
            self._prompt_ids[at].decode(),
            zip(self.columns.labels[span].tolist(), self.columns.counts[span].tolist(), strict=True),
            block.rows(group),
            tuple(self._numbers[at].tolist()),
        )

    def pick(self, indices: np.ndarray) -> ExampleTable:
        """Return the groups at ``indices`` ([n] int64), in that order."""
        picked = (column[indices] for column in (self._groups, self._prompt_ids, self._numbers))
        return ExampleTable(self.file, self.columns.pick(indices), *picked)


def examples_of(
    prompt_id: str, specs: Iterable[tuple[float, int]], rows: Rows, numbers: tuple[float, ...]
) -> tuple[Example, ...]:
    """Return the examples of a group by (label, number of rows) of each. ``numbers``: ``Group.numbers``"""
    pending = iter(rows)
    return tuple(
        Example(prompt_id, tuple(itertools.islice(pending, count)), label, numbers=numbers)
        for label, count in specs
    )


def rows_of(groups: ExampleGroups) -> Iterator[Sequence]:
    """Yield every row of these groups, in order."""
    return (row for group in groups for example in group for row in example.rows)


def columns_of(groups: ExampleGroups) -> Columns:
    """Return the numbers of these examples."""
    if isinstance(groups, ExampleTable):
        return groups.columns
    examples, rows = [example for group in groups for example in group], list(rows_of(groups))
    return Columns(
        np.array([len(group) for group in groups], np.int32),
        np.array([len(example.rows) for example in examples], np.int32),
        np.array([example.label for example in examples], np.float64),
        np.array([len(row.prompt_ids) for row in rows], np.int32),
        np.array([len(row.completion_ids) for row in rows], np.int32),
        np.array([row.behavior_logprobs is not None for row in rows], bool),
    )


def longest(groups: ExampleGroups, packed: bool = True) -> Example:
    """Return the first of the examples with most tokens in its rows, as ``data.balance.share_tokens`` counts
    them: padding included where rows are not ``packed``."""
    columns = columns_of(groups)
    rows = np.add(columns.prompts, columns.completions, dtype=np.int64)
    firsts = np.append(0, np.cumsum(columns.counts))[:-1]
    tokens = np.add.reduceat(rows, firsts) if packed else columns.counts * np.maximum.reduceat(rows, firsts)
    most = int(tokens.argmax())
    group = int(np.searchsorted(np.cumsum(columns.sizes), most, side="right"))
    return groups[group][most - int(columns.sizes[:group].sum())]


def picked_groups(groups: ExampleGroups, indices: np.ndarray) -> ExampleGroups:
    """Return the groups at ``indices`` ([n] int64), in that order."""
    return groups.pick(indices) if isinstance(groups, ExampleTable) else [groups[i] for i in indices]


def token_ids(groups: ExampleGroups) -> Iterator[np.ndarray]:
    """Yield the token ids of every row: its prompt's, then its completion's."""
    return (ids for row in rows_of(groups) for ids in (row.prompt_ids, row.completion_ids))


def row_keys(groups: ExampleGroups) -> np.ndarray:
    """Return ``Sequence.key`` of every row, [rows] of dtype S32, in order."""
    return np.fromiter((row.key.encode() for row in rows_of(groups)), "S32", len(columns_of(groups).prompts))


@dataclass(frozen=True)
class Examples:
    """The examples of each group that has any, and why the other groups have none."""

    groups: ExampleGroups
    dropped: dict[str, int]
    """reason -> number of groups"""

    @property
    def count(self) -> int:
        return int(columns_of(self.groups).sizes.sum())


class _Wanted:
    """The rows that a view selects from groups, as columns of numbers."""

    def __init__(self, groups: Seq[Group], view: View) -> None:
        sizes, counts, labels, completions = array("i"), array("i"), array("d"), array("i")
        prompt_ids, digest, numbers = bytearray(), hashlib.sha256(), array("d")
        for group in groups:
            numbers.extend(group.numbers)
            prompt_ids += group.prompt.id.encode()
            specs = view(group)
            sizes.append(len(specs))
            for spec in specs:
                labels.append(spec.label)
                counts.append(len(spec.completions))
                completions.extend(spec.completions)
                for i in spec.completions:
                    digest.update(_words(group.prompt, group.completions[i]))
            digest.update(b"\f")  # which repr escapes, as it escapes line ends
        self.groups, self.prompt_ids = groups, np.frombuffer(bytes(prompt_ids), "S16")
        self.numbers = np.array(numbers).reshape(len(sizes), -1) if numbers else np.empty((len(sizes), 0))
        """[groups, columns] float64: ``Group.numbers``"""
        self.sizes, self.counts, self.labels = np.array(sizes), np.array(counts), np.array(labels)
        """[groups], [examples]: the number of examples, and of rows, of each; [examples]"""
        self.completions, self.words = completions, digest.hexdigest()
        """the index of each row's completion in its group; a digest of what all rows' tokens depend on"""
        self._starts = np.append(0, np.cumsum(self.sizes))

    def specs(self, group: int) -> Iterator[tuple[float, int]]:
        """Yield (label, number of rows) of each example of a group."""
        span = slice(*self._starts[group : group + 2].tolist())
        return zip(self.labels[span].tolist(), self.counts[span].tolist(), strict=True)

    def table(self, file: TokenFile) -> ExampleTable:
        """Return the examples of the groups that ``file``, which has the rows of all, gives a row for."""
        kept = np.flatnonzero(file.counts)
        examples = ranges(self._starts[kept], self._starts[kept + 1])
        prompts = np.repeat(file.prompt_sizes[kept], file.counts[kept])
        numbers = (self.sizes[kept], self.counts[examples], self.labels[examples])
        columns = Columns(*numbers, prompts, file.sizes, file.behavior)
        return ExampleTable(file, columns, kept, self.prompt_ids[kept], self.numbers[kept])

    def parts(self, at_once: int) -> Iterator[list[list[tuple[Prompt, Completion]]]]:
        """Yield the rows of each group, many groups together: at least ``at_once`` rows."""
        part: list[list[tuple[Prompt, Completion]]] = []
        held, left = 0, iter(self.completions)
        for g, group in enumerate(self.groups):
            count = sum(rows for _, rows in self.specs(g))
            part.append([(group.prompt, group.completions[i]) for i in itertools.islice(left, count)])
            held += count
            if held >= at_once:
                yield part
                part, held = [], 0
        yield part

    def tokenised(self, renderer: Renderer) -> Iterator[Rows | str]:
        """Yield the rows of each group, or why there are none, and show how far this is."""
        rows = len(self.completions)
        with progress(rows, "tokenise (data.path)", unit="row", shown=None, delay=SOON) as bar:
            for part in self.parts(_AT_ONCE):
                yield from _tokenised(renderer, part)
                bar.update(sum(map(len, part)))


def _tokenised(renderer: Renderer, groups: list[list[tuple[Prompt, Completion]]]) -> Iterator[Rows | str]:
    sequences = iter(renderer.sequences(row for group in groups for row in group))
    for group in groups:
        completions = [completion for _, completion in group]
        yield _of_group([with_tokens(next(sequences), completion) for completion in completions], completions)


def _of_group(rows: list[Sequence | str], completions: list[Completion]) -> Rows | str:
    """Return the rows of a group, or the first reason why they cannot be trained on."""
    sound = tuple(row for row in rows if not isinstance(row, str))
    if len(sound) < len(rows):
        return next(row for row in rows if isinstance(row, str))
    if len(rows) == 2 and np.array_equal(sound[0].completion_ids, sound[1].completion_ids):
        texts = {completion.text for completion in completions}
        if len(texts) == 2 and None not in texts:
            return _MADE_EQUAL  # they carry no preference
    return sound or SAYS_NOTHING


def with_tokens(row: Sequence | str, completion: Completion) -> Sequence | str:
    """Return the row with what is known about each of its tokens, log mu and whether it counts; or the reason
    why it cannot be trained on. An end token that the renderer added has no log mu, and counts."""
    if isinstance(row, str):
        return row
    size = len(row.completion_ids)

    def filled(values: Seq[float], rest: float, kind: Any) -> np.ndarray:
        padded = np.full(size, rest, kind)
        padded[: len(values)] = values[:size]
        return padded

    if completion.behavior_logprobs is not None:
        row = replace(row, behavior_logprobs=filled(completion.behavior_logprobs, np.nan, np.float32))
    if completion.loss_mask is not None and not all(completion.loss_mask):
        mask = filled(completion.loss_mask, True, bool)
        return replace(row, loss_mask=mask) if mask.any() else "its loss_mask leaves no token to train on"
    return row


def _words(prompt: Prompt, completion: Completion) -> bytes:
    """Return everything of a row that its tokens depend on. No two lists of rows give the same bytes."""
    per_token = (completion.behavior_logprobs, completion.loss_mask)
    content = (completion.text, completion.token_ids, completion.finished, completion.keys, *per_token)
    return f"\n{prompt.id}{content!r}{completion.stopped and repr(completion.stopped)}".encode()


def make_examples(
    groups: Iterable[Group], view: View, renderer: Renderer, cache: TokenCache | None = None
) -> Examples:
    """Tokenise the rows that ``view`` selects from each group, or read from ``cache`` the result of an
    earlier start on the same rows. If any selected row of a group cannot be tokenised (no completion token
    left), the whole group is dropped, so that every loss drops the same groups."""
    wanted = _Wanted(groups if isinstance(groups, Seq) else list(groups), view)
    rows = len(wanted.completions)
    example_groups: ExampleGroups
    if cache is None or rows < cache.worth:  # kept, and not made again for every batch
        held = [tokenised for part in wanted.parts(rows + 1) for tokenised in _tokenised(renderer, part)]
        why = {g: tokenised for g, tokenised in enumerate(held) if isinstance(tokenised, str)}
        example_groups = tuple(
            examples_of(
                wanted.prompt_ids[g].decode(), wanted.specs(g), tokenised, tuple(wanted.numbers[g].tolist())
            )
            for g, tokenised in enumerate(held)
            if not isinstance(tokenised, str)
        )
    else:
        file = cache.get(renderer, wanted.words, lambda: wanted.tokenised(renderer))
        why, example_groups = file.reasons, wanted.table(file)
    dropped: dict[str, int] = {}
    first: dict[str, str] = {}
    for group, reason in why.items():
        if "chat template" in reason:  # what it refuses is seen in the row
            place = first.setdefault(reason, wanted.groups[group].place)
            reason += f" (first: {place})" if place else ""
        dropped[reason] = dropped.get(reason, 0) + 1
    return Examples(example_groups, dropped)


# Digests, which tell whether a resumed run was given the same data. They depend on the content and its order
# alone, not on how the rows are dealt to ranks.


def groups_digest(groups: ExampleGroups) -> str:
    """Return 32 hex digits of the examples of these groups: token ids, which of them count, labels. Reading a
    million pairs from the token cache takes seconds."""
    digest, columns = hashlib.blake2b(digest_size=16), columns_of(groups)
    digest.update(np.ascontiguousarray(columns.sizes, int).data)
    digest.update(np.ascontiguousarray(columns.labels, float).data)
    digest.update(np.ascontiguousarray(columns.prompts, int).data)
    digest.update(np.ascontiguousarray(columns.completions, int).data)
    if len(groups) and groups[0] and groups[0][0].numbers:  # data.numbers: all examples have some, or none
        digest.update(np.array([example.numbers for group in groups for example in group]).data)
    for row in rows_of(groups):
        digest.update(np.ascontiguousarray(row.prompt_ids, np.int32).data)
        digest.update(np.ascontiguousarray(row.completion_ids, np.int32).data)
        if row.loss_mask is not None:
            digest.update(np.ascontiguousarray(row.loss_mask, bool).data)
    return digest.hexdigest()


def token_values_digest(groups: ExampleGroups) -> str:
    """Return 32 hex digits of the ``behavior_logprobs`` of these groups. Groups without any are not read if
    they are in a file."""
    digest = hashlib.blake2b(digest_size=16)
    for row in () if isinstance(groups, ExampleTable) and not groups.file.any_values else rows_of(groups):
        values = row.behavior_logprobs
        digest.update(b"-" if values is None else np.ascontiguousarray(values, np.float32).data)
    return digest.hexdigest()


def prompts_digest(prompts: Iterable[Prompt]) -> str:
    """Return 32 hex digits of prompts, their reference answers and their columns."""
    digest = hashlib.blake2b(digest_size=16)
    for one in prompts:
        digest.update(repr((one.id, one.reference_answer, one.columns)).encode(errors="surrogatepass"))
    return digest.hexdigest()
