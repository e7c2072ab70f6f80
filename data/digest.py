"""Digests of what a run trains on, which tell whether a resumed run was given the same data.

They depend on the content and its order alone, not on how the rows are stored or dealt to ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from data.example_table import ExampleGroups, ExampleTable, labels_of, row_arrays, row_lengths, sizes_of
from data.types import Prompt


def groups_digest(groups: ExampleGroups) -> str:
    """Return 32 hex digits of the examples of these groups: token ids, which of them count, labels. Reading a
    million pairs from the token cache takes seconds."""
    digest = hashlib.blake2b(digest_size=16)
    for column in (sizes_of(groups), labels_of(groups), *row_lengths(groups)):
        kind = np.float64 if column.dtype.kind == "f" else np.int64
        digest.update(np.ascontiguousarray(column, kind).data)
    if len(groups) and groups[0] and groups[0][0].numbers:  # data.numbers: all examples have some, or none
        digest.update(np.array([example.numbers for group in groups for example in group]).data)
    for part in row_arrays(groups):
        digest.update(part.data)
    return digest.hexdigest()


def token_values_digest(groups: ExampleGroups) -> str:
    """Return 32 hex digits of what is known of the tokens of these groups: ``behavior_logprobs`` and
    ``token_rewards``. Groups without any are not read."""
    digest = hashlib.blake2b(digest_size=16)
    for group in groups if not isinstance(groups, ExampleTable) or groups.has_token_values else ():
        for row in (row for example in group for row in example.rows):
            for values in (row.behavior_logprobs, row.token_rewards):
                digest.update(b"-" if values is None else np.ascontiguousarray(values, np.float32).data)
    return digest.hexdigest()


def prompts_digest(prompts: Iterable[Prompt]) -> str:
    """Return 32 hex digits of prompts and their reference answers."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        digest.update(repr((prompt.id, prompt.reference_answer)).encode(errors="surrogatepass"))
    return digest.hexdigest()
