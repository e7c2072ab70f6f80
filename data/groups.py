"""Groups files: one group a line, the seam between sampling and training. What is written here trains offline with ``data=local``.

A line: ``{"id", "prompt": [{"role", "content"}], "reference", "completions": [{"text", "token_ids", "finished"}],
"rewards": [...]}``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.errors import DataError
from config.schema_data import DataConfig
from data.formats import RowError, Values, answered, each_row, prompt_of, turns, value
from data.rows import Row, read_rows
from data.types import Completion, Group


def write_groups(path: Path, groups: Iterable[Group]) -> None:
    """Write a groups file whole, then rename it into place: a reader sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with unfinished.open("w", encoding="utf-8") as stream:
        for group in groups:
            stream.write(json.dumps(to_dict(group), ensure_ascii=False) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.replace(path)


def read_groups(path: Path) -> list[Group]:
    """The groups of a file that ``write_groups`` wrote. Raises DataError at the first row that is not one: none may be missing."""
    result = []
    for row in read_rows(path):
        if not isinstance(row, Row):
            raise DataError(
                f"{path}, line {row.row}: {row.reason}; the file was not written whole, make it again"
            )
        try:
            result.append(from_dict(row.values))
        except RowError as error:
            raise DataError(f"{path}, line {row.number}: {error}; the file is not a groups file") from error
    return result


def to_dict(group: Group) -> dict[str, Any]:
    """The JSON object of a group."""
    return {
        "id": group.prompt.id,
        "prompt": [{"role": turn.role, "content": turn.content} for turn in group.prompt.turns],
        "reference": group.prompt.reference,
        "completions": [
            {
                "text": c.text,
                "token_ids": None if c.token_ids is None else list(c.token_ids),
                "finished": c.finished,
            }
            for c in group.completions
        ],
        "rewards": list(group.rewards),
    }


def from_dict(values: Values) -> Group:
    """The group of a JSON object; ``prompt`` and completions may also be plain strings or messages.

    ``id`` is not read: identity is by content. Raises RowError.
    """
    prompt = prompt_of(turns(value(values, "prompt"), "prompt"), values.get("reference"))
    completions, rewards = value(values, "completions"), value(values, "rewards")
    if not isinstance(completions, list) or not isinstance(rewards, list) or len(completions) != len(rewards):
        raise RowError("'completions' and 'rewards' are not two lists of one length")
    if not all(isinstance(r, int | float) and math.isfinite(r) for r in rewards):
        raise RowError("'rewards' are not all finite numbers")
    return Group(prompt, tuple(_completion(c) for c in completions), tuple(float(r) for r in rewards))


def _completion(found: Any) -> Completion:
    if not isinstance(found, dict):
        return Completion(answered((), found, "completions")[1])
    words, ids = found.get("text"), found.get("token_ids")
    if words is None and ids is None:
        raise RowError("a completion has neither 'text' nor 'token_ids'")
    if not (words is None or isinstance(words, str)) or not (
        ids is None or all(isinstance(i, int) for i in ids)
    ):
        raise RowError("a completion's 'text' is not a string or its 'token_ids' are not integers")
    return Completion(words, None if ids is None else tuple(ids), bool(found.get("finished", True)))


@each_row
def groups(values: Values, config: DataConfig) -> Group:
    """The format of groups files, and of any table with a list of answers and a list of their scores (by ``data.columns``)."""
    return from_dict(values)
