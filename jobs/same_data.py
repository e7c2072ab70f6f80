"""The data of a resumed run, compared with those that the run was started with. Every checkpoint's state has
their digest; other data at the same place would silently continue the run with other rows."""

from __future__ import annotations

from pathlib import Path

from common.errors import ConfigError
from common.files import read_json
from config.schema import Config
from data.digest import groups_digest, prompts_digest
from jobs.plan import Plan
from rollouts.rounds import PromptSchedule

KEY = "data"
"""Key of the digest in a checkpoint's state."""


def checked_digest(folder: Path, config: Config, plan: Plan, prompts: PromptSchedule | None) -> str:
    """Return the digest of what the run in ``folder`` trains on: the examples of ``plan``, before
    ``data.logprob_range`` chooses among them, or the ``prompts`` of online rounds.

    Raises ConfigError if the run is resumed and its checkpoints were written with other data. Checkpoints of
    earlier versions do not say with which."""
    digest = groups_digest(plan.examples.groups) if prompts is None else prompts_digest(prompts.prompts)
    before = _recorded(folder) if config.resume else None
    if before is not None and before != digest:
        key, value = ("data.path", config.data.path) if config.data.path else ("data", config.data.name)
        rows = "rows" if prompts is None else "prompts"
        raise ConfigError(
            key,
            value,
            f"the training data are not those that this run was started with ({folder}; their {rows} are "
            f"compared as token ids), so it would go on with other {rows}; bring the old data back, or start "
            "another run (exp_name)",
        )
    return digest


def _recorded(folder: Path) -> str | None:
    """Return the digest in the newest checkpoint that has one; None if none has."""
    for path in sorted((folder / "checkpoints").glob("step_*[0-9]/state.json"), reverse=True):
        try:
            state = read_json(path)
        except (OSError, ValueError):  # the run passes over a damaged checkpoint
            continue
        if isinstance(state, dict) and isinstance(state.get(KEY), str):
            return str(state[KEY])
    return None
