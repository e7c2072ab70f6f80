"""Measure the likelihood of the training data under the initial weights, for the selection of groups by
``data.logprob_range`` and for the data report (paper §5.2.1, Figure 6)."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from common.errors import ConfigError
from common.files import read_sealed, sealed, write_whole
from data.examples import ExampleGroups, Examples, columns_of, picked_groups, row_keys
from data.quality import can_be_clipped
from data.selection import Selection, Spread, select
from jobs.initial_scores import initial_scores
from jobs.run_folder import SELECTION
from models.distributed import on_main
from models.reference import Reference
from trainers.basic import BasicTrainer

Scores = Mapping[str, Tensor]
"""Row key -> [C] log-probabilities of its completion tokens under the initial weights, nats"""


def score_groups(trainer: BasicTrainer, groups: ExampleGroups, parts: dict[str, str]) -> Scores:
    """Return the scores of every row of these groups under the policy's current weights.

    Scores that the cache on disk has are read from it."""
    size = trainer.config.reference_batch_size or trainer.config.model.eval_batch_size
    return initial_scores(
        trainer, [list(group) for group in groups], size, Reference(by_row=True), parts, "score training data"
    )


def choose_groups(
    trainer: BasicTrainer, examples: Examples, parts: dict[str, str], folder: Path
) -> tuple[Examples, Selection, Scores]:
    """Return the examples that ``data.logprob_range`` keeps, the selection, and the scores of all rows.

    The result is the same on every rank. Groups are ranked by the mean log-probability of all completion
    tokens that they train on. For a pair this mean covers chosen and rejected together: the paper speaks of
    "the average token log-probability of the output" and does not say how a pair's two outputs are combined.
    So DPO, KTO and GRPO keep the same pairs. Raises StoppedError (``select``) and ConfigError
    (``kept_before``).
    """
    share = trainer.config.data.logprob_range
    assert share is not None
    scores = score_groups(trainer, examples.groups, parts)
    fresh = select(group_means(examples.groups, scores), share)
    selection = on_main(lambda: kept_before(folder / SELECTION, examples.groups, fresh))
    kept = picked_groups(examples.groups, np.array(selection.kept, np.int64))
    return replace(examples, groups=kept), selection, scores


def group_means(groups: ExampleGroups, scores: Scores) -> np.ndarray:
    """Return the mean log-probability of each group's completion tokens, [groups] float64, nats.

    A row counts once, even if several examples share it."""
    keys, columns = row_keys(groups), columns_of(groups)
    sums, counts = (_of_each_row(keys, scores, what) for what in (lambda row: row.double().sum(), len))
    ends = np.append(0, np.cumsum(columns.counts))[np.cumsum(columns.sizes)]
    out = np.empty(len(groups))
    for g, (first, last) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        rows = [first + r for r in np.sort(np.unique(keys[first:last], return_index=True)[1])]
        out[g] = sum(sums[rows].tolist()) / sum(counts[rows].tolist())
    return out


def _of_each_row(keys: np.ndarray, scores: Scores, what: Callable[[Tensor], Any]) -> np.ndarray:
    """Return [rows] float64, ``what`` of the scores of each of the rows ``keys``; NaN for one that was not
    scored. Scores are read in their own order, in which their files are read once."""
    names, row_values = np.zeros(len(scores) + 1, "S32"), np.full(len(scores) + 1, math.nan)
    for i, (key, values) in enumerate(scores.items()):
        names[i], row_values[i] = key, float(what(values))
    order = np.argsort(names)
    at = order[np.minimum(np.searchsorted(names[order], keys), len(scores))]
    return np.where(names[at] == keys, row_values[at], math.nan)


def kept_before(path: Path, groups: ExampleGroups, fresh: Selection) -> Selection:
    """Return the selection that the file ``path`` recorded when the run started.

    If there is no file, ``fresh`` is written to it and returned. A resumed run trains on the groups it
    started with, even if the last bits of a score have changed since (another number of ranks, another GPU).
    Raises ConfigError if the training data have changed.
    """
    digest = hashlib.sha256(
        "\n".join(row.key for group in groups for example in group for row in example.rows).encode()
    ).hexdigest()
    if not path.exists():
        write_whole(path, sealed({"rows": digest, "selection": asdict(fresh)}))
        return fresh
    try:
        record = read_sealed(path)
        rows, saved = record["rows"], _selection(record["selection"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "data.logprob_range",
            list(fresh.range),
            f"{path} is damaged ({type(error).__name__}: {error}): it says which groups this run trains on; "
            "put it back, or start another run (exp_name)",
        ) from error
    if rows != digest:
        raise ConfigError(
            "data.logprob_range",
            list(fresh.range),
            f"{path}: the training data are not those that this run was started "
            "with, so it would go on with other groups; bring the old data back, or start another run "
            "(exp_name)",
        )
    return saved


def _selection(saved: dict[str, Any]) -> Selection:
    """Return the selection that ``kept_before`` wrote. Raises KeyError or TypeError for anything else."""
    return Selection(
        **saved
        | {"range": tuple(saved["range"]), "kept": tuple(saved["kept"]), "all": Spread(**saved["all"])}
    )


def completion_means(groups: ExampleGroups, scores: Scores) -> dict[str, np.ndarray]:
    """Return the mean token log-probability of each completion, nats, under "chosen" and "rejected".

    Desirable completions count as chosen, undesirable ones as rejected. NaN where a completion was not
    scored."""
    keys, signs = row_keys(groups), columns_of(groups).signs
    means = _of_each_row(keys, scores, lambda row: row.double().mean())
    kinds = {"chosen": means[signs > 0], "rejected": means[~(signs > 0)]}
    return {kind: values for kind, values in kinds.items() if len(values)}


def clippable_share(rows: Iterable[Tensor], log_epsilon_R: float) -> float | None:
    """Return the share of these rows' tokens that can be clipped from above; None without tokens.

    ``rows``: [C] log-probabilities of each row, nats."""
    counts = np.array(
        [(int(can_be_clipped(values.numpy(), log_epsilon_R).sum()), len(values)) for values in rows]
    ).reshape(-1, 2)
    clippable, tokens = counts.sum(axis=0)
    return float(clippable / tokens) if tokens else None
