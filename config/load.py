"""Conversion of what Hydra composed, or of a run's config.yaml, into typed settings, and back; and what a
run's folder says about its run: whether it is one, whether the run has begun, and its settings.

All refusals here happen before torch is imported, so that a wrong command line costs a second.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError  # type: ignore[import-untyped]

from common.errors import ConfigError, require
from common.files import check_name, read_sealed, regular_file
from common.secrets import scrub, scrub_text
from config.files import parsed, section, walk
from config.removed import LAST, refuse_removed
from config.schema import Config
from config.sections import typed, word_of

T = TypeVar("T")


OPERATIONAL = frozenset(section("reads.yaml")["operational"].split())
"""Settings that do not change what is computed, so a run may be resumed with other values."""
ABSENT = "not a setting"
"""The value that stands for a setting that is missing."""
VERSION = "0.2.0"
"""This version of the project. A run's config.yaml begins with the version that wrote it."""
MARKER = "run.json"
"""The file that marks a folder as a run's; written before anything else."""
RECORD = "config.yaml"
"""The settings of the run; written once weights and data are loaded."""
LOCK = "run.lock"
"""Held by the process that is working in the folder (common.lock)."""
KIND = "humanline run"
MAY_CHANGE = section("reads.yaml")["may_change"].split()
"""Settings that may differ when a run is resumed. They change what is measured or kept, which machines
sample, how weights reach them or how long they stay gathered, but not what is trained."""
_SECTIONS = {"model", "data", "loss", "trainer", "runs_dir"}


def of_run(key: str, default: Any, *, _parent_: DictConfig) -> Any:
    """Return what ``${of_run:key,default}`` in a model's file stands for: the model setting ``key`` of the
    run whose folder, or whose ``model`` folder, ``name_or_path`` is; otherwise ``default``. A model thus
    keeps the setting that it was trained with."""
    if OmegaConf.is_missing(_parent_, "name_or_path") or not _parent_.get("name_or_path"):
        return default
    path = Path(str(_parent_.name_or_path))
    folder = path.parent if path.name == "model" else path
    try:
        return parsed(regular_file(folder / "config.yaml").read_text(encoding="utf-8"))["model"][key]
    except (OSError, ValueError, TypeError, KeyError, YAMLError):
        return default


OmegaConf.register_new_resolver("of_run", of_run, replace=True)
OmegaConf.register_new_resolver(
    "on_cpu", lambda here, otherwise: otherwise if has_gpu() else here, replace=True
)


def has_gpu() -> bool:
    """Return whether this machine has a GPU that this process may use, by its device files: torch, which
    knows, takes a second to import."""
    files = ("nvidia[0-9]*", "dxg", "kfd")  # NVIDIA's, the same under Windows, AMD's
    hidden = any(os.environ.get(f"{maker}_VISIBLE_DEVICES") in ("", "-1") for maker in ("CUDA", "HIP"))
    return not hidden and any(path for name in files for path in Path("/dev").glob(name))


def for_a_cpu(cfg: DictConfig) -> list[str]:
    """Return a sentence about the settings that a file of config/model sets to other values on a CPU, if they
    were not typed and this is one; otherwise []."""
    written = walk(OmegaConf.to_container(cfg, resolve=False))
    keys = [key for key, value in written if str(value).startswith("${on_cpu:")]
    values = " ".join(f"{key}={str(OmegaConf.select(cfg, key)).lower()}" for key in keys)
    return [f"small numbers for a CPU: {values}; type others"] if keys and not has_gpu() else []


def load(cfg: DictConfig | dict[str, Any]) -> Config:
    """Return the checked Config that Hydra composed. Raises ConfigError, see ``typed``, and for what
    is gone."""
    tree: Any = cfg if isinstance(cfg, dict) else OmegaConf.to_container(cfg, resolve=True)
    refuse_removed(flat(tree).items())
    return typed(tree, Config)


def split_settings(cfg: DictConfig, schema: type[T]) -> tuple[T, DictConfig]:
    """Split the settings of a program whose file starts from config.yaml. Return (the program's own settings,
    typed; the remaining settings, those of a run).

    A field whose metadata has a ``key`` has that name in the file. Raises ConfigError as ``typed`` does.
    """
    rest = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=False)
    assert isinstance(rest, dict)
    keys = {item.name: str(item.metadata.get("key", item.name)) for item in fields(schema)}  # type: ignore[arg-type]
    program_settings = {name: rest.pop(key) for name, key in keys.items()}
    try:
        return typed(OmegaConf.create(program_settings), schema), OmegaConf.create(rest)
    except ConfigError as error:
        raise ConfigError(keys.get(error.key, error.key), error.value, error.remedy) from error


def load_saved(text: str) -> Config:
    """Return the configuration that ``dump`` wrote. Raises ConfigError."""
    return load(OmegaConf.create(settings_of(text)))


def check_version(text: str, run: Path) -> None:
    """Raise ConfigError if ``text``, the config.yaml of ``run``, was written by a version whose runs this one
    does not read: versions that differ in their first two numbers. Version 0.1.0 did not say its number."""
    wrote = re.match(r"# humanline (\S+)\n", text)
    version = wrote[1] if wrote else "0.1.0"
    same = version.split(".")[:2] == VERSION.split(".")[:2]
    fault = f"was made by humanline {version}, whose runs {VERSION} does not read; the last commit that does"
    require(same, "run", run, f"{fault} is {LAST}")


def load_run(run: Path, trust_remote_code: bool) -> Config:
    """Return the configuration of a run's folder, for a program that loads its weights. With
    ``trust_remote_code`` False, settings that would run code that comes with a model are refused. Raises
    ConfigError."""
    record = run / RECORD
    require(record.is_file(), "run", run, "is not the folder of a run: it has no config.yaml")
    text = record.read_text(encoding="utf-8", errors="replace")
    require(bool(settings_of(text)), "run", run, f"has no settings: {record} is damaged; put it back")
    check_version(text, run)
    config = load_saved(text)
    require(
        trust_remote_code or not config.model.trust_remote_code,
        "model.trust_remote_code",
        "true",
        f"{record} would run code that comes with {config.model.name_or_path}; --trust-remote-code lets it",
    )
    return config


def dump(config: Config) -> str:
    """Return the configuration as yaml, in the form of a run's ``config.yaml``, without secrets. A run that
    is resumed gets them from its command line or the environment again."""
    return f"# humanline {VERSION}\n{OmegaConf.to_yaml(scrub(asdict(config), show=False))}"


def run_name(config: Config, overrides: list[str]) -> str:
    """Return ``exp_name``, or a name made of loss, model, data, variant, seed and a hash of the overrides
    that change what is computed.

    Raises ConfigError if the name cannot be that of a folder.
    """
    name = config.exp_name
    if name is None:
        other = sorted(o for o in overrides if not _operational(o.split("=")[0].lstrip("+~")))
        digest = hashlib.sha256("\n".join(other).encode()).hexdigest()[:6]
        parts = (config.loss["name"], config.model.name, config.data.name, config.variant, f"s{config.seed}")
        name = "-".join([*parts, digest])
    check_name("exp_name", name)
    require(scrub_text(name) == name, "exp_name", name, "looks like a secret, and names the run's folder")
    return name


def _operational(key: str) -> bool:
    """Return whether a setting, or the section that it belongs to, does not change what is computed."""
    return key.split(".")[0] in OPERATIONAL


def settings_of(text: str) -> dict[str, Any]:
    """Return the settings in a run's config.yaml as nested plain data; {} if the text is empty or not a yaml
    file of settings."""
    try:
        tree = parsed(text)
    except (YAMLError, ValueError, TypeError):  # the latter two: a malformed number or key
        return {}
    return {str(key): value for key, value in tree.items()} if isinstance(tree, dict) else {}


class Change(NamedTuple):
    """A setting whose value has changed. The word of a setting, or null, stands for None."""

    key: str
    before: Any
    now: Any


def changed(before: dict[str, Any], now: Config) -> list[Change]:
    """Return the settings that differ between ``before`` (from ``settings_of``) and ``now`` and that change
    what is computed, sorted by name. A secret that ``dump`` removed equals any other."""
    old, new = (flat(scrub(tree, show=False)) for tree in (before, asdict(now)))
    return [
        Change(key, *(_in_words(key, tree.get(key, ABSENT)) for tree in (old, new)))
        for key in sorted(old | new)
        if not _operational(key) and old.get(key, ABSENT) != new.get(key, ABSENT)
    ]


def _in_words(key: str, value: Any) -> Any:
    return value if value is not None else word_of(Config, key) or "null"


def flat(tree: Any) -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    return {key: value for key, value in walk(tree) if not isinstance(value, dict)}


def texts(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, value) of every text of nested settings, those of the section ``prefix``."""
    inside = walk({prefix: tree} if prefix else tree, lists=True)
    return ((key, value) for key, value in inside if isinstance(value, str))


# -- a run's folder --------------------------------------------------------------------------------


def marked(folder: Path) -> bool:
    """Return whether ``folder`` has the marker of a run, as it was written."""
    try:
        return bool(read_sealed(folder / MARKER).get("kind") == KIND)
    except (OSError, ValueError):
        return False


def unmarked_run(folder: Path) -> bool:
    """Return whether ``folder`` has a run's settings but no marker, or a damaged one."""
    return not marked(folder) and settings_of(_record(folder)).keys() >= _SECTIONS


def started(folder: Path) -> bool:
    """Return whether ``folder`` holds a run that can be resumed: a checkpoint, a logged step, or a finished
    run.

    A start that was refused leaves none of these. A run that lost its marker counts as started.
    """
    metrics = folder / "metrics.jsonl"
    return (
        (folder / "summary.json").exists()
        or (folder / "model").exists()
        or any((folder / "checkpoints").glob("step_*[0-9]"))
        or (metrics.is_file() and metrics.stat().st_size > 0)
        or unmarked_run(folder)
    )


def changes(folder: Path, config: Config) -> list[Change]:
    """Return the settings that differ between the start of the run in ``folder`` and ``config`` and that
    change what is computed. The list is empty if there is no record of the run's settings.

    Raises ConfigError for a damaged record, and for one of another version.
    """
    if not (folder / RECORD).exists():
        return []
    text = _record(folder)
    before = settings_of(text)
    if not before.keys() >= _SECTIONS:
        raise ConfigError(
            "exp_name",
            folder.name,
            f"{folder / RECORD} is damaged: settings are missing. Put it back; or delete that file, and "
            "resume=true "
            "goes on with the settings of the command line, which must be those that the run was started "
            "with",
        )
    check_version(text, folder)
    return changed(before, config)


def refused_changes(made: Iterable[Change]) -> list[Change]:
    """Return those of ``made`` (by ``changes``) with which the run cannot be resumed."""
    return [other for other in made if other.key not in MAY_CHANGE]


def _record(folder: Path) -> str:
    """Return the text of the record; empty if there is no readable record."""
    try:
        return regular_file(folder / RECORD).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
