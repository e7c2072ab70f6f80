"""Mixing of several data sets by weight (``data=mix``)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from common.errors import require
from config.files import group_file
from config.schema_data import DataConfig, MixPart
from data.rows import Loaded
from data.sources import load_groups, load_splits
from data.types import Group
from data.views import prompt_ids


def mixed(config: DataConfig, split: str) -> Loaded:
    """Return groups from every set of ``data.mix``, in proportion to the weights. No prompt that any of the
    sets evaluates on is trained on.

    Raises ConfigError for a set that does not exist or cannot be part of a mix, DataError for a set without a
    usable row.
    """
    assert config.mix  # DataConfig checks it
    parts = [
        replace(part_config(part), ignore_columns=config.ignore_columns, max_unreadable=config.max_unreadable)
        for part in config.mix
    ]
    weights = [part.weight for part in config.mix]
    if split == "eval":
        loaded = [load_groups(part, "eval") for part in parts]
    else:
        both = [load_splits(part) for part in parts]
        held_out = np.concatenate([prompt_ids(evaluation.groups) for _, evaluation in both])
        loaded = [
            replace(train, groups=[train.groups[i] for i in np.flatnonzero(~np.isin(ids, held_out))])
            for train, _ in both
            for ids in [prompt_ids(train.groups)]
        ]
    chosen = by_weight([part.groups for part in loaded], weights)
    origin = "; ".join(
        f"{len(groups)} of {len(part.groups)} groups of {part.origin}"
        for groups, part in zip(chosen, loaded, strict=True)
    )
    return Loaded(
        list(itertools.chain(*chosen)),
        sum(part.read for part in loaded),
        [row for part in loaded for row in part.dropped],
        origin,
        ", ".join(dict.fromkeys(part.format for part in loaded if part.format)),
        tuple(dict.fromkeys(column for part in loaded for column in part.columns)),
        tuple(dict.fromkeys(column for part in loaded for column in part.unused)),
        next((part.refusal for part in loaded if part.refusal is not None), None),
    )


def part_config(part: MixPart) -> DataConfig:
    """Return the settings of one set, from its own file. Raises ConfigError."""
    settings = group_file("data", "data.mix.name", part.name)
    paths = {key: path for key in ("path", "eval_path") if (path := getattr(part, key)) is not None}
    has_path = settings["source"] != "data.mix.mixed" and (settings | paths).get("path") != "???"
    why = "needs a path of its own, and is no mix itself: give {name: local, path: pairs.jsonl, weight: 1}"
    require(has_path, "data.mix.name", part.name, f"{why}, or another set")
    config = DataConfig(**settings | paths)
    why = f"config/data/{part.name}.yaml sets logprob_range, which orders a whole mix: take it out there"
    require(config.logprob_range is None, "data.mix.name", part.name, f"{why} and give data.logprob_range")
    return config


def by_weight(sets: Sequence[Sequence[Group]], weights: Sequence[float]) -> list[Sequence[Group]]:
    """Return a part of each set, in proportion to the weights and without repetition, for the largest mix
    that the sets allow. Prompt ids decide which groups are chosen, so that the choice does not depend on the
    order of the rows. An empty set does not limit the mix."""
    scale = min(
        (len(groups) / weight for groups, weight in zip(sets, weights, strict=True) if groups), default=0.0
    )
    counts = [int(scale * weight + 1e-9) for weight in weights]
    return [
        [groups[i] for i in np.argsort(prompt_ids(groups), kind="stable")[:n]]
        for groups, n in zip(sets, counts, strict=True)
    ]
