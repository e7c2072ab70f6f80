"""The records of an evaluation's target and of its result, which every kind of evaluation shares."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.files import files_digest
from config.schema import Config
from data.types import Prompt
from reports.provenance import git_commit, versions

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Target:
    """A model to be evaluated: of a run, of a run's checkpoint, in a folder, or on the hub; or a file of its
    answers."""

    name: str
    """name in tables and as AlpacaEval's generator: the run's name, or the model's"""
    config: Config
    """``model.name_or_path`` is ready to be loaded; the evaluation uses its data, sampler and reward"""
    out: Path
    """folder of the results"""
    run: Path | None = None
    """the run's folder; None for a model that belongs to no run"""
    step: int | None = None
    """the model is the checkpoint before this step; None: the run's final model"""
    answers: Path | None = None
    """file of answers sampled elsewhere; no model is loaded then"""
    other: Target | None = None
    """kind=compare: the target that it is compared with"""


@dataclass(frozen=True)
class Evaluation:
    """The result of one kind of evaluation for one target."""

    values: dict[str, Any]
    """numbers by name, which may be nested. ``launch.results`` shows every number but skips lists
    (confidence intervals) and ``counts``"""
    table: list[list[str]] = field(default_factory=list)
    """the printed table, heading first"""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """one record per answer, so that the numbers can be checked by hand"""
    settings: dict[str, Any] = field(default_factory=dict)
    """everything that the numbers depend on in addition to the fingerprints"""
    fingerprints: dict[str, Any] = field(default_factory=dict)
    items: dict[str, dict[str, Any]] = field(default_factory=dict)
    """values by metric and prompt id, from which several runs are pooled; not written"""


def fingerprints(target: Target, prompts: Sequence[Prompt] = (), **more: str) -> dict[str, Any]:
    """Return digests of what an evaluation depends on.

    They cover the weights' files and the model's config (or the file of answers), the prompts with their
    reference answers, the code's commit, and the versions of the libraries. ``more``: further entries of a
    kind."""
    from models.fingerprint import architecture_digest
    from rollouts.weights import weights_digest

    digests: dict[str, Any] = {}
    if target.answers is not None:
        digests["answers"] = files_digest([target.answers])
    else:
        digests["weights"] = weights_digest(target.config)
        digests["architecture"] = architecture_digest(target.config.model)
    if prompts:
        digests["prompts"] = hashlib.sha256(
            repr([(p.id, p.reference_answer) for p in prompts]).encode()
        ).hexdigest()
    return digests | {"code": git_commit(ROOT), "versions": versions()} | more
