"""The inputs of a resumed run, compared with those that the run was started with. Every checkpoint's state has their
fingerprints: another input at the same place would silently continue the run with other rows, weights or rewards.
"""  # noqa: E501

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name

from common.errors import ConfigError, require
from common.files import files_digest, read_json
from config.load import texts
from config.schema import Config
from config.schema_data import evaluation_sets
from data.batches import Segment
from data.examples import groups_digest, prompts_digest, token_values_digest
from data.types import Group
from data.views import prompts_of
from jobs.evaluation_sets import EvaluationSet
from jobs.plan import Plan
from jobs.run_folder import note
from rollouts.rounds import PromptSchedule

DATA, INPUTS = "data", "inputs"
"""Keys of the fingerprints in a checkpoint's state: that of the training data, and those of all other inputs by name."""  # noqa: E501
WEIGHTS = "weights"
_BY_CONTENT = ("model.name_or_path", "data.path")
"""Names on the hub whose commit may change, as its weights and rows have fingerprints."""
_REWARDS = "rollouts.rewards."
_FILES = ("*.safetensors", "*.bin", "*.json")


def data_inputs(
    config: Config,
    plan: Plan,
    prompts: PromptSchedule | None,
    sets: Sequence[EvaluationSet],
) -> dict[str, str]:
    """Return the fingerprints of what the run reads besides its weights: the examples of ``plan``, before
    ``data.logprob_range`` chooses among them, or the ``prompts`` of online rounds; what is known of each
    token; the held-out rows and prompts; the files of reward models that lie in folders, and of
    code that settings name."""
    rows = plan.examples.groups
    fingerprints = {DATA: groups_digest(rows) if prompts is None else prompts_digest(prompts.prompts)}
    if prompts is None:
        fingerprints["token_values"] = token_values_digest(rows)
    held_out: dict[str, tuple[Segment | None, Sequence[Group]]] = {
        "evaluation": (plan.held_out, plan.evaluation.groups)
    }
    held_out |= {f"evaluations.{one.name}": (one.held_out, one.checkable) for one in sets}
    for name, (segment, groups) in held_out.items():
        scored = "" if segment is None else groups_digest(segment.groups)
        fingerprints[name] = scored + prompts_digest(prompts_of(groups))
    return fingerprints | reward_files(config) | code_files(config)


def reward_files(config: Config) -> dict[str, str]:
    """Return setting -> SHA-256 of the files of each reward model that lies in a folder."""
    return {
        key: files_digest(files)
        for key, name, _ in _models(config)
        if (files := sorted(path for kind in _FILES for path in Path(name).glob(kind)))
    }


def hub_commits(config: Config) -> dict[str, str]:
    """Return setting -> commit of each model and data set that comes from the hub, as this machine's cache
    resolved its name. One that is not in the cache yet is left out."""
    named = [("model.name_or_path", config.model.name_or_path, config.model.revision), *_models(config)]
    commits = {key: _commit(name, "model", revision) for key, name, revision in named}
    commits["data.path"] = _commit(config.data.path or "", "dataset", config.data.revision)
    return {key: commit for key, commit in commits.items() if commit is not None}


def code_files(config: Config) -> dict[str, str]:
    """Return setting -> SHA-256 of the file of the function or class that it names by its import path: the
    loss and its trainer, what verifies and corrects, and, online, what rewards."""
    files = {key: _source(name) for key, name in _code(config).items()}
    return {key: files_digest([Path(file)]) for key, file in files.items() if file is not None}


def reward_code(config: Config) -> list[str]:
    """Return the settings that name code which gives rewards and is not the project's."""
    code = {key: name for key, name in _code(config).items() if _source(name) is not None}
    custom = [
        key for key, name in code.items() if key.startswith("reward.") and not name.startswith(_REWARDS)
    ]
    verifies = any(name.startswith(f"{_REWARDS}verifier.") for name in code.values())
    return custom + [key for key in ("data.verifier",) if verifies and key in code]


def _code(config: Config) -> dict[str, str]:
    """Return setting -> the import path of the function or class that it names."""
    sections = ("loss", "trainer", "correction", *(("reward",) if config.online else ()))
    named = [
        (key, name)
        for section in sections
        for key, name in texts(asdict(config)[section], section)
        if key.endswith(("._target_", ".path"))
    ]
    sets = evaluation_sets(config.evaluations, config.data)
    named += [(f"evaluations.{name}.verifier", data.verifier or "") for name, data in sets.items()]
    return dict([*named, ("data.verifier", config.data.verifier or "")])


def _source(name: str) -> str | None:
    """Return the file of the function or class at an import path."""
    try:
        spec = importlib.util.find_spec(name.rpartition(".")[0])
    except (ImportError, AttributeError, ValueError):  # what uses it says so
        return None
    return spec.origin if spec is not None and spec.has_location else None


def _models(config: Config) -> Iterator[tuple[str, str, str | None]]:
    """Yield (setting, name, revision) of the models that give rewards."""
    settings = dict(texts(asdict(config)["reward"] if config.online else None, "reward"))
    for key, name in settings.items():
        if key.endswith(".name_or_path"):
            yield key, name, settings.get(f"{key.removesuffix('name_or_path')}revision")


def _commit(name: str, kind: str, revision: str | None) -> str | None:
    if name.count("/") > 1 or not name or Path(name).exists():
        return None
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=kind)
    try:
        return (folder / "refs" / (revision or "main")).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return revision if (folder / "snapshots" / (revision or "-")).is_dir() else None


def check_inputs(folder: Path, config: Config, inputs: Mapping[str, str]) -> None:
    """Raise ConfigError if the run in ``folder`` is resumed and its checkpoints were written with another
    input than ``inputs``, unless ``resume_with_other`` names it: that is printed and noted in run.json.

    A checkpoint of an earlier version does not say every input; what it does not say counts as the same."""
    before = _recorded(folder) if config.resume else {}
    unsaid = sorted(inputs.keys() - before.keys())
    if before and unsaid:
        print(f"note: the checkpoint does not say with which {', '.join(unsaid)} the run was started")
    for name in sorted(inputs.keys() & before.keys()):
        if inputs[name] == before[name]:
            continue
        if name in _BY_CONTENT:
            print(f"note: {name}: its commit was {before[name]} and is {inputs[name]}, with the same content")
            continue
        if name not in config.resume_with_other:
            raise _refused(folder, config, name)
        print(f"note: {name} is not what this run was started with; it goes on (resume_with_other)")
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        note(folder, "went_on_with_other", {name: [before[name], inputs[name]], "at": now})


def _refused(folder: Path, config: Config, name: str) -> ConfigError:
    settings: Any = asdict(config)
    for part in name.split("."):
        settings = settings.get(part) if isinstance(settings, dict) else None
    key, value, why = name, settings, f"is not what this run was started with ({folder})"
    if name in (DATA, "token_values"):
        key, value = ("data.path", config.data.path) if config.data.path else ("data", config.data.name)
        what = "prompts" if config.online else "rows" if name == DATA else "behavior_logprobs"
        compared = "compared as token ids" if name == DATA else "compared bit by bit"
        why = (
            f"the training data are not those that this run was started with ({folder}; their {what} are "
            f"{compared}), so it would go on with other {what}"
        )
    elif name == "evaluation":
        key, value = "data.eval_path", config.data.eval_path
        why = (
            "the held-out rows are not those that this run was started with: its evaluations, keep_best and "
            "patience would compare two different sets"
        )
    elif name == WEIGHTS:
        key, value = "model.name_or_path", config.model.name_or_path
        why = (
            "the initial weights are not those that this run was started with, which are its reference (and, "
            "with LoRA, its frozen base)"
        )
    again = "bring the old one back, or start another run (exp_name)"
    goes_on = f"resume_with_other=[{name}] goes on with what is there now"
    return ConfigError(key, value, f"{why}; {again}; {goes_on}")


def _recorded(folder: Path) -> dict[str, str]:
    """Return the fingerprints in the newest checkpoint that has any; {} if none has."""
    for path in sorted((folder / "checkpoints").glob("step_*[0-9]/state.json"), reverse=True):
        try:
            state = read_json(path)
        except (OSError, ValueError):  # the run passes over a damaged checkpoint
            continue
        if isinstance(state, dict) and isinstance(state.get(DATA), str):
            others = state.get(INPUTS)
            return {DATA: str(state[DATA]), **(others if isinstance(others, dict) else {})}
    return {}


def check_names(config: Config, inputs: Mapping[str, str]) -> None:
    """Raise ConfigError for a name in ``resume_with_other`` that no input has."""
    for name in config.resume_with_other:
        there = ", ".join(sorted(inputs))
        require(name in inputs, "resume_with_other", name, f"names no input of this run; there are {there}")
