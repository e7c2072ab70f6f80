"""Groups files, with one group per line, which connect sampling and training. A file written here can be
trained on offline with ``data=local``.

A line: ``{"id", "prompt": [{"role", "content"}], "reference", "completions": [{"text", "token_ids",
"finished", "tokenizer", "behavior_logprobs"}], "rewards": [...]}``, ``tools`` if the prompt has any, and
``columns``, an object, if its row had others. ``tokenizer`` is the fingerprint of the vocabulary that the
ids belong to. ``behavior_logprobs`` has a number or null for each of ``token_ids``: its log-probability in
nats, without truncation, under the policy that wrote it. If the logits were divided by a temperature other
than 1, ``behavior_temperature`` gives that temperature. Lines without these two keys are read too. Without
``token_ids``, ``behavior_logprobs`` has nothing to refer to and is not read.

A completion with ``token_ids`` may also have ``loss_mask``, a 0 or 1 for each of them, where 0 marks context
that the policy did not write.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.errors import DataError
from common.files import whole_file
from config.schema_data import DataConfig
from data.columns import Values, named
from data.formats import (
    answered,
    each_row,
    keys_of,
    listed,
    placed,
    prompt_of,
    question,
    shown,
    truth,
    with_tools,
)
from data.json_values import are_finite
from data.rows import Row, RowError, read_rows
from data.types import Completion, Group, Prompt

_ROUNDING = 1e-3
"""nats by which an engine's log-probability may exceed 0"""


def write_groups(path: Path, groups: Iterable[Group]) -> None:
    """Write a groups file. A reader sees the whole file or none of it. Raises OSError."""
    with whole_file(path) as stream:
        for group in groups:
            stream.write((to_line(to_dict(group)) + "\n").encode())


def read_groups(path: Path, key: str = "data.path") -> list[Group]:
    """Return the groups of a file that ``write_groups`` wrote, and the setting ``key`` named. Raises
    DataError at the first row that is not a group, because no row may be missing."""
    result = []
    for row in read_rows(path, key):
        if not isinstance(row, Row):
            raise DataError(
                f"{path}, line {row.row}: {row.reason}; the file was not written whole, make it again"
            )
        try:
            result.append(placed(from_dict(row.values), row))
        except RowError as error:
            raise DataError(f"{path}, line {row.number}: {error}; the file is not a groups file") from error
    return result


def to_dict(group: Group) -> dict[str, Any]:
    """Return the JSON object of a group."""
    return answered_dict(group.prompt, group.completions) | {"rewards": list(group.rewards)}


def answered_dict(prompt: Prompt, completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the JSON object of a prompt and its completions."""
    columns = {"columns": json.loads(prompt.columns)} if prompt.columns else {}
    head = {"id": prompt.id, **prompt_dict(prompt), "reference": prompt.reference_answer}
    return columns | head | {"completions": [_completion_dict(completion) for completion in completions]}


to_line = json.JSONEncoder(ensure_ascii=False).encode


def prompt_dict(prompt: Prompt) -> dict[str, Any]:
    """Return the keys of a line that say what a prompt shows the model."""
    tools = {"tools": json.loads(prompt.tools)} if prompt.tools else {}
    return {"prompt": [turn.message for turn in prompt.turns], **tools}


def _completion_dict(completion: Completion) -> dict[str, Any]:
    ids = completion.token_ids
    fields: dict[str, Any] = {
        "text": completion.text,
        "token_ids": None if ids is None else list(ids),
        "finished": completion.finished,
    }
    said = {"stopped": completion.stopped, "tokenizer": completion.tokenizer}
    fields |= {key: value for key, value in said.items() if value}
    if completion.behavior_logprobs is not None:
        values: list[float | None] = list(completion.behavior_logprobs)
        if any(map(math.isnan, completion.behavior_logprobs)):
            values = [None if math.isnan(v) else v for v in completion.behavior_logprobs]
        fields["behavior_logprobs"] = values
        if completion.behavior_temperature != 1:
            fields["behavior_temperature"] = completion.behavior_temperature
    if completion.loss_mask is not None:
        fields["loss_mask"] = [int(counts) for counts in completion.loss_mask]
    return fields | (json.loads(completion.keys) if completion.keys else {})


def from_dict(values: Values) -> Group:
    """Return the group of a JSON object; ``prompt`` and completions may also be plain strings or messages.

    ``id`` is not read, because identity is by content. Raises RowError.
    """
    prompt = prompt_of(question(values), values.get("reference"))
    if isinstance(others := values.get("columns"), dict) and others:
        prompt = replace(prompt, columns=json.dumps(others, ensure_ascii=False))
    completions, rewards = (
        listed(values, named(values, part) or part) for part in ("completions", "rewards")
    )
    if len(completions) != len(rewards):
        raise RowError("'completions' and 'rewards' are not two lists of one length")
    if not are_finite(rewards):
        raise RowError("'rewards' are not all finite numbers")
    group = Group(prompt, tuple(_completion(c) for c in completions), tuple(map(float, rewards)))
    return with_tools(group, values)


def _completion(record: Any) -> Completion:
    if not isinstance(record, dict):
        return answered((), record, "completions")[1]
    _check_fields(record)
    words, ids, mask = record.get("text"), record.get("token_ids"), record.get("loss_mask")
    stopped = record.get("stopped") or ""
    finished = record.get("finished") is None or truth(record, "finished")
    if ids is None:
        return Completion(words, None, finished, keys=keys_of(record, "completions", False), stopped=stopped)
    behavior = _behavior(record.get("behavior_logprobs"), len(ids))
    return Completion(
        words,
        tuple(ids),
        finished,
        record.get("tokenizer"),
        behavior,
        float(record.get("behavior_temperature", 1.0)),
        None if mask is None else tuple(map(bool, mask)),
        stopped=stopped,
    )


def _check_fields(record: dict[str, Any]) -> None:
    """Raise RowError for a completion without text and tokens, or with a field of another type."""
    words, ids, whose = record.get("text"), record.get("token_ids"), record.get("tokenizer")
    mask, stopped = record.get("loss_mask"), record.get("stopped") or ""
    at = record.get("behavior_temperature", 1.0)
    if words is None and ids is None:
        raise RowError("a completion has neither 'text' nor 'token_ids'")
    numbers = ids is None or (isinstance(ids, list) and {*map(type, ids)} <= {int} and min(ids or [0]) >= 0)
    flags = mask is None or (isinstance(mask, list) and {*map(repr, mask)} <= {"0", "1", "False", "True"})
    for key, sound, wrong in (
        ("text", isinstance(words, str | None), f"is a {type(words).__name__}, not a string"),
        ("token_ids", numbers, "are not a list of integers from 0 on"),
        ("tokenizer", isinstance(whose, str | None), "is not a string, the fingerprint of a vocabulary"),
        ("stopped", isinstance(stopped, str), "is not a string, the one that ended it"),
        ("loss_mask", flags, "is not a list of 0 and 1"),
        ("behavior_temperature", ids is None or (are_finite([at]) and at > 0), "is not a number above 0"),
    ):
        if not sound:
            raise RowError(f"a completion's {key!r} {wrong}")
    if mask is not None and len(mask) != len(ids or ()):
        raise RowError(
            f"a completion has {len(mask)} loss_mask and "
            + (f"{len(ids)} token_ids: they belong to other tokens" if ids else "no token_ids to go with")
        )


def _behavior(logprobs: Any, tokens: int) -> tuple[float, ...] | None:
    """Return a completion's ``behavior_logprobs``, with NaN for null; None if there are none. Raises
    RowError."""
    if logprobs is None:
        return None
    if not isinstance(logprobs, list) or not are_finite([v for v in logprobs if v is not None], _ROUNDING):
        raise RowError("a completion's 'behavior_logprobs' are not a list of numbers up to 0, or null")
    if len(logprobs) != tokens:
        raise RowError(
            f"a completion has {len(logprobs)} behavior_logprobs and {tokens} token_ids: they belong to "
            "other tokens"
        )
    return tuple(math.nan if v is None else float(v) for v in logprobs)


@each_row
def groups(values: Values, config: DataConfig) -> Group:
    """Convert a row of a groups file, or of any table with a list of answers and a list of their scores
    (renamed by ``data.columns``)."""
    return from_dict(values)


def check_token_ids(groups: Iterable[Group], tokenizer: str, size: int) -> None:
    """Raise DataError for the first token ids of another tokenizer, which would stand for other words in
    training.

    ``tokenizer`` is the fingerprint (``data.chat.vocabulary_fingerprint``) of the run's tokenizer; ``size``
    is the number of ids that its model accepts. Ids of an unknown tokenizer must be below ``size``.
    """
    for group in groups:
        for completion in group.completions:
            ids = completion.token_ids or ()
            other = completion.tokenizer not in (None, tokenizer)
            if other or any(i >= size for i in ids):
                why = (
                    f"token_ids of another tokenizer ({completion.tokenizer}, and the model's is {tokenizer})"
                    if other
                    else f"the token id {shown(max(ids))}, and the model's vocabulary has {size}"
                )
                raise DataError(
                    f"{group.place or f'prompt {group.prompt.id}'}: {why}; train the model that they were "
                    "sampled from, or take token_ids out of the file: then the texts are tokenised"
                )
