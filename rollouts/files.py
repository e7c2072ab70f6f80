"""Samples and feedback as files for other programs. The formats are groups files, AlpacaEval's outputs, and
HALOs' sample and feedback JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from common.errors import ConfigError, DataError, require
from common.files import check_writable, part_of, write_whole
from config.schema_sampler import RoundsConfig
from data.formats import answered, prompt_of, text, turns, value, with_tools
from data.groups import prompt_dict, write_groups
from data.rows import Row, RowError, read_rows
from data.types import Group, Turn
from rollouts.ledger import sampled_line, sampled_of
from rollouts.rounds import SampledPrompt, feedback, with_scores, with_threshold

Line = dict[str, Any]
Scores = list[list[float | None]]


def refuse_existing(path: Path, overwrite: bool) -> None:
    """Raise ConfigError for a file that exists already or that could not be written, before anything is
    computed for it."""
    try:
        there = path.exists()
        part_of(path).exists()  # it is written under this name first, which may be too long
    except (OSError, ValueError) as error:
        raise ConfigError("out", path, f"cannot be written: {error}; choose another path") from error
    require(overwrite or not there, "out", path, "is there already; overwrite_out=true writes over it")
    require(not path.is_dir(), "out", path, "is a folder: name a file in it")
    check_writable("out", path, path.parent)


# Samples


def write_samples(
    path: Path, samples: Sequence[SampledPrompt], form: str, generator: str, dataset: str
) -> None:
    """Write samples as ``groups`` (JSON lines with token ids, without rewards), ``alpacaeval`` or
    ``halos``."""
    if form == "groups":
        write_whole(
            path, "".join(json.dumps(sampled_line(one), ensure_ascii=False) + "\n" for one in samples)
        )
    elif form == "alpacaeval":
        _write_list(
            path,
            [
                {"instruction": one.prompt.turns[-1].content, "output": c.text, "generator": generator}
                for one in samples
                for c in one.completions
            ],
        )
    else:
        common = {"generator": generator, "dataset": dataset, "type": "sample"}
        _write_list(
            path,
            [
                _prompt(i, one) | {"output": c.text, "sample_id": k, **common}
                for i, one in enumerate(samples)
                for k, c in enumerate(one.completions)
            ],
        )


def read_samples(path: Path, first: int | None = None) -> list[SampledPrompt]:
    """Return the samples in a file of any of those formats, gathered by prompt, in order of first appearance;
    only those of the ``first`` rows if it is given. Raises DataError."""
    sampled_prompts: dict[str, SampledPrompt] = {}
    for row in islice(read_rows(path, "in"), first):
        if not isinstance(row, Row):
            raise DataError(f"{path}, row {row.row}: {row.reason}")
        try:
            one = sampled_of(dict(row.values)) if "completions" in row.values else _one_sample(row.values)
        except RowError as error:
            raise DataError(
                f"{path}, row {row.number}: {error}; in= takes the files that sample.py writes, and HALOs' "
                "samples"
            ) from error
        before = sampled_prompts.get(one.prompt.id, SampledPrompt(one.prompt, ()))
        sampled_prompts[one.prompt.id] = SampledPrompt(before.prompt, before.completions + one.completions)
    return list(sampled_prompts.values())


def _one_sample(values: Any) -> SampledPrompt:
    """Parse a row of AlpacaEval's outputs or of HALOs' samples."""
    prompt_turns = (
        (Turn("user", text(values, "instruction")),)
        if "prompt" not in values
        else turns(value(values, "prompt"), "prompt")
    )
    prompt = with_tools(Group(prompt_of(prompt_turns, values.get("reference"))), values).prompt
    return SampledPrompt(prompt, (answered((), value(values, "output"), "output")[1],))


# Feedback


def write_feedback(
    path: Path, samples: Sequence[SampledPrompt], scores: Scores, form: str, config: RoundsConfig, seed: int
) -> int:
    """Write the feedback that the scores give, as ``groups`` or as HALOs' ``binary``, ``pairwise`` or
    ``scalar`` feedback, and return the number of entries. The ``rounds`` settings decide which samples are
    compared and by how much they must differ (rollouts.rounds.feedback)."""
    config = with_threshold(config, scores)
    if form == "groups":
        groups = [
            g for one, values in zip(samples, scores, strict=True) for g in _built(one, values, config, seed)
        ]
        write_groups(path, groups)
        return len(groups)
    entries = [
        entry
        for i, (one, values) in enumerate(zip(samples, scores, strict=True))
        for entry in (
            _pairs(i, one, _built(one, values, config, seed))
            if form == "pairwise"
            else _singles(i, one, values, form, config)
        )
    ]
    _write_list(path, entries)
    return len(entries)


def _built(
    one: SampledPrompt, values: Sequence[float | None], config: RoundsConfig, seed: int
) -> list[Group]:
    outcome = feedback(one, values, config, seed)
    return [] if isinstance(outcome, str) else outcome


def _singles(
    i: int, one: SampledPrompt, values: Sequence[float | None], form: str, config: RoundsConfig
) -> list[Line]:
    """Return an entry for each of a prompt's samples, with a label in ``binary`` feedback."""
    group = with_scores(one, values)
    return [
        _prompt(i, one)
        | {"output": [c.turn.message]}
        | ({"label": int(r >= config.threshold)} if form == "binary" else {})
        | {"reward": r, "type": f"{form}_feedback"}
        for c, r in zip(group.completions, group.rewards, strict=True)
    ]


def _pairs(i: int, one: SampledPrompt, pairs: list[Group]) -> list[Line]:
    """Return the entries of a prompt's pairs, with the better sample as A."""
    return [
        _prompt(i, one)
        | {
            "output_A": [g.completions[0].turn.message],
            "output_B": [g.completions[1].turn.message],
            "label": 1,
            "reward_A": g.rewards[0],
            "reward_B": g.rewards[1],
            "reward_difference": g.rewards[0] - g.rewards[1],
            "type": "pairwise_feedback",
        }
        for g in pairs
    ]


def _prompt(i: int, one: SampledPrompt) -> Line:
    line: Line = {"prompt_id": i, **prompt_dict(one.prompt)}
    return line if one.prompt.reference_answer is None else line | {"reference": one.prompt.reference_answer}


def _write_list(path: Path, entries: list[Line]) -> None:
    write_whole(path, json.dumps(entries, indent=1, ensure_ascii=False) + "\n")
