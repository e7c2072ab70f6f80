"""The inputs of a resumed run, compared with those of its newest checkpoint. Every checkpoint's state has their
fingerprints: another input at the same place would silently continue the run with other rows, weights or rewards.
"""  # noqa: E501

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from common.errors import ConfigError, require
from common.files import FileDigests, resolve_model_path
from common.imports import module_and_name, modules_beside
from config.load import MARKER, flat, texts
from config.schema import Config
from config.schema_data import evaluation_sets
from data.batches import Segment
from data.chat import Renderer
from data.examples import groups_digest, prompts_digest, token_values_digest
from data.types import Group
from data.views import prompts_of
from jobs.plan import EvaluationSet, Plan
from jobs.run_folder import note, recorded, run_id, states
from models.fingerprint import architecture_digest
from rollouts.ledger import RoundFolder

Inputs = dict[str, Any]
"""Name of an input -> its fingerprint; of a model's folder or of code: file -> its digest."""
DATA, WEIGHTS, COMMIT = "data", "weights", "commit"
_TENSORS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf")
"""Endings of files that are not compared in the policy's own folder: its tensors are (``weights``)."""
_MODEL = "model.name_or_path"
_WHY = {
    "renderer": (_MODEL, "texts become other tokens (by tokenizer, chat template or a library's version)"),
    "architecture": (_MODEL, "the model's configuration, as transformers reads it, is another"),
    WEIGHTS: (_MODEL, "the initial weights are others, which are its reference (and LoRA's frozen base)"),
    "seed": ("seed", "its checkpoints are of a run with another seed"),
    DATA: ("data.path", "the training data are others: it would go on with other prompts or rows"),
    "token_values": ("data.path", "the behavior_logprobs of its rows are others (compared bit by bit)"),
    "evaluation": (
        "data.eval_path",
        "the held-out rows are others: keep_best would compare two different sets",
    ),
}
"""Input that is no file's -> the setting that it is of, and what another one means."""


def inputs_of(config: Config, plan: Plan, renderer: Renderer, sets: Sequence[EvaluationSet]) -> Inputs:
    """Return the fingerprints of what the run reads besides its weights: ``file_inputs``; how texts become
    tokens; the model's configuration; the examples of ``plan``, before ``data.logprob_range`` chooses among
    them, or the prompts of online rounds; what is known of each token; the held-out rows and prompts.

    Prompts are compared as texts: with the same renderer, these give the same token ids."""
    inputs = file_inputs(config)
    inputs |= {"renderer": renderer.fingerprint, "architecture": architecture_digest(config.model)}
    inputs["seed"] = config.seed
    rows = plan.examples.groups
    inputs[DATA] = prompts_digest(plan.prompts) if config.online else groups_digest(rows)
    if not config.online:
        inputs["token_values"] = token_values_digest(rows)
    held_out: dict[str, tuple[Segment | None, Sequence[Group]]] = {
        "evaluation": (plan.held_out, plan.evaluation.groups)
    }
    held_out |= {f"evaluations.{one.name}": (one.held_out, one.checkable) for one in sets}
    for name, (segment, groups) in held_out.items():
        scored = "" if segment is None else groups_digest(segment.groups)
        inputs[name] = scored + prompts_digest(prompts_of(groups))
    return inputs


def file_inputs(config: Config) -> Inputs:
    """Return setting -> file -> digest, of the models, tokenizers and files that settings name by their
    place, and of the code that they name with what it imports from its own folder."""
    digests = FileDigests(Path(config.cache_dir) / "digests.json")
    inputs: Inputs = {key: _of_place(key, place, digests) for key, place in _places(config)}
    for key, name in _code(config).items():
        if files := modules_beside(module_and_name(name)[0]):
            inputs[key] = {place: digests.of(file) for place, file in sorted(files.items())}
    digests.save()
    return inputs


def _settings(config: Config) -> dict[str, str]:
    """Return setting -> text of the sections of what is trained, and, online, of what samples and rewards."""
    of_rounds = ("sampler", "reward") * config.online
    tree, sections = asdict(config), ("model", "loss", "trainer", "correction", "humanline_rule", *of_rounds)
    return {key: name for section in sections for key, name in texts(tree[section], section)}


def _places(config: Config) -> Iterator[tuple[str, Path]]:
    """Yield (setting, folder or file) of the models, tokenizers and files that the run reads, where they are
    on this machine already."""
    settings = _settings(config)
    for key, name in settings.items():
        if key.endswith("name_or_path"):
            folder = Path(resolve_model_path(name))
            if not folder.is_dir():
                revision = settings.get(key.replace("name_or_path", "revision"))
                with suppress(OSError, ValueError):  # it may not be in the hub's cache
                    folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
            if folder.is_dir():
                yield key, folder
        elif os.path.isfile(name) or os.path.isdir(name):  # of any text; Path raises for one that is too long
            place = Path(resolve_model_path(name))
            if place.is_file() or any(place.glob("*config.json")):  # not a folder to write to
                yield key, place


def _of_place(key: str, folder: Path, digests: FileDigests) -> dict[str, str]:
    """Return file -> digest of a file, or of everything in a model's folder but hidden files and README, and
    but the tensors of the policy; with the commit if it is of the hub, whose files are fetched when they are
    needed."""
    if folder.is_file():
        return {folder.name: digests.of(folder)}
    skipped = _TENSORS if key.startswith("model.") else ()
    there = sorted(folder.glob("*")) + sorted(folder.glob("additional_chat_templates/*"))
    read = [path for path in there if path.is_file() and not path.name.startswith((".", "README"))]
    files = {str(path.relative_to(folder)): digests.of(path) for path in read if path.suffix not in skipped}
    return files | ({COMMIT: folder.name} if folder.parent.name == "snapshots" else {})


def _code(config: Config) -> dict[str, str]:
    """Return setting -> the import path of the function or class that it names: the loss and its trainer, the
    optimizer, what clips, corrects and verifies, and, online, what samples and rewards."""
    named = [(key, name) for key, name in _settings(config).items() if key.endswith(("._target_", ".path"))]
    sets = evaluation_sets(config.evaluations, config.data)
    named += [(f"evaluations.{name}.verifier", data.verifier or "") for name, data in sets.items()]
    return dict([*named, ("optimizer", config.optimizer), ("data.verifier", config.data.verifier or "")])


def check_inputs(folder: Path, config: Config, inputs: Mapping[str, Any]) -> None:
    """Raise ConfigError if the run in ``folder`` is resumed and its checkpoints were written with another
    input than ``inputs``, unless ``resume_with_other`` names it: that is printed and noted in run.json."""
    before = recorded(folder) if config.resume else {}
    other = [name for name in inputs if before and not _same(before.get(name), inputs[name])]
    refused = [name for name in other if name not in config.resume_with_other]
    if refused:
        raise _refused(folder, config, refused, before.get(refused[0]), inputs[refused[0]])
    for name in other:
        print(f"note: {name} is not what this run was started with; it goes on (resume_with_other)")
        note(folder, "went_on_with_other", {name: [before.get(name), inputs[name]]})


def _same(before: Any, now: Any) -> bool:
    """Return whether two fingerprints are of the same input. A commit of the hub says it of all its files,
    whichever of them are there."""
    both = isinstance(before, dict) and isinstance(now, dict) and COMMIT in before
    return bool(before == now or (both and before[COMMIT] == now.get(COMMIT)))


def _refused(folder: Path, config: Config, names: list[str], before: Any, now: Any) -> ConfigError:
    """Return the error for inputs that are others; ``before`` and ``now``: fingerprints of the first."""
    key, why = _WHY.get(names[0], (names[0], "is another"))
    if key.startswith("evaluations.") and key.count(".") == 1:
        key, why = f"{key}.path", _WHY["evaluation"][1]
    elif isinstance(before, dict) and isinstance(now, dict):
        files = sorted(file for file in before.keys() | now.keys() if before.get(file) != now.get(file))
        named = [one for one in files if one != COMMIT][:3] or files
        why = f"its {' and '.join(named)}{' and more' * (len(files) > 3)} changed, or came or went"
    return ConfigError(
        key,
        flat(asdict(config)).get(key),
        f"is not what the run in {folder} was started with: {why}; bring the old one back, or start another "
        f"run (exp_name); 'resume_with_other=[{','.join(names)}]' goes on with what is there now",
    )


def check_origin(folder: Path) -> None:
    """Raise ConfigError for a checkpoint, and DataError for a round, of another run than that of ``folder``,
    or of another place than its name says: folders were merged, or two of one kind swapped."""
    run = run_id(folder)
    for path, inputs, step in states(folder):
        named, other = int(path.name.rpartition("_")[2]), inputs.get("run")
        where = f"{path} is of step {step} of run {other}, and {folder / MARKER} is of run {run}"
        matches = (run, named) == (other, step)
        require(matches, "resume", True, f"{where}: move it away, or bring the run's own back")
    for path in sorted((folder / "rounds").glob("*")):
        if path.name.isdecimal():
            _ = RoundFolder(path, run=run).record


def check_names(config: Config, inputs: Collection[str]) -> None:
    """Raise ConfigError for a name in ``resume_with_other`` that no input has."""
    for name in config.resume_with_other:
        there = ", ".join(sorted(inputs))
        require(name in inputs, "resume_with_other", name, f"names no input of this run; there are {there}")
