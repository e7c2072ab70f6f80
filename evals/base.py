"""What is evaluated, and what an evaluation says: the two records that every kind of evaluation shares."""

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
    """A model to be evaluated: of a run, of a run's checkpoint, in a folder, on the hub; or a file of its
    answers."""

    name: str
    """what it is called in tables and as AlpacaEval's generator: the run's name, or the model's"""
    config: Config
    """``model.name_or_path`` can be loaded as it is; data, sampler and reward are what the evaluation uses"""
    out: Path
    """the folder that results go to"""
    run: Path | None = None
    """the run's folder; None for a model that is no run"""
    step: int | None = None
    """the checkpoint before this step; None: the run's final model"""
    answers: Path | None = None
    """its answers, sampled elsewhere: nothing is loaded then"""
    other: Target | None = None
    """kind=compare: what it is compared with"""

    def model_folder(self) -> Path:
        """The model's own files on disk; a hub model is downloaded. Raises ConfigError."""
        from rollouts.weights import (
            model_folder,  # torch takes seconds that a wrong command line need not wait
        )

        return model_folder(self.config)


@dataclass(frozen=True)
class Evaluation:
    """What one kind of evaluation found about one target."""

    values: dict[str, Any]
    """numbers by name, which may be nested. ``launch.results`` shows every number; lists (confidence
    intervals) and ``counts`` it skips"""
    table: list[list[str]] = field(default_factory=list)
    """what is printed, heading first"""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """an answer each, so that the numbers can be checked by hand"""
    settings: dict[str, Any] = field(default_factory=dict)
    """what the numbers depend on beside the fingerprints"""
    fingerprints: dict[str, Any] = field(default_factory=dict)
    items: dict[str, dict[str, Any]] = field(default_factory=dict)
    """what several runs are pooled from, by metric and prompt id; not written"""


def fingerprints(target: Target, prompts: Sequence[Prompt] = (), **more: str) -> dict[str, Any]:
    """Digests of what an evaluation depends on: the weights' files, the prompts with their reference answers,
    the code's commit, and the versions of the libraries. ``more``: what else a kind wants kept."""
    from rollouts.weights import weights_digest

    found: dict[str, Any] = {}
    if target.answers is not None:
        found["answers"] = files_digest([target.answers])
    else:
        found["weights"] = weights_digest(target.config)
    if prompts:
        found["prompts"] = hashlib.sha256(
            repr([(p.id, p.reference_answer) for p in prompts]).encode()
        ).hexdigest()
    return found | {"code": git_commit(ROOT), "versions": versions()} | more
