"""A run's settings, versions and commit for other people (tracker, report, model card)."""

from __future__ import annotations

import json
import platform
import subprocess
from pathlib import Path
from typing import Any

from common.versions import installed
from config import schema
from config.schema_trainer import recorded_numbers

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft", "vllm")


def variant(config: dict[str, Any]) -> str:
    """Return which of the paper's four variants a saved config (config.yaml) is."""
    return schema.variant(bool(config.get("online")), bool(config.get("humanline")), config.get("sync_mode"))


def number(value: Any) -> str:
    """Return a setting as text: what is not a text as in yaml."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def facts(config: dict[str, Any]) -> dict[str, str]:
    """Return the settings that characterize a run, the most important first: label -> text."""
    model, data, loss = (config.get(part) or {} for part in ("model", "data", "loss"))

    def pinned(name: Any, section: dict[str, Any]) -> Any:
        return f"{name}, revision {section['revision']}" if name and section.get("revision") else name

    def listed(values: dict[str, Any]) -> str:
        inside = ", ".join(f"{key} = {number(value)}" for key, value in values.items())
        return f" ({inside})" if inside else ""

    clip = {key: config.get(key) for key in ("log_epsilon_P", "log_epsilon_R", "sync_freq")}
    chosen = {
        "Base model": pinned(model.get("name_or_path"), model),
        "Loss": f"{loss['name']}{listed(recorded_numbers(config))}" if "name" in loss else None,
        "Variant": variant(config) + listed(clip if config.get("humanline") else {}) if config else None,
        "Data": pinned(data.get("path") or data.get("name"), data),
        "Seed": config.get("seed"),
        "Learning rate": config.get("lr"),
        "Batch size": model.get("batch_size"),
        "Largest gradient norm": model.get("max_grad_norm"),
        "LoRA": f"rank {model.get('peft', {}).get('lora_r')}, merged" if model.get("use_peft") else None,
        "Frozen base": model.get("quantization"),
    }
    return {key: number(value) for key, value in chosen.items() if value not in (None, "")}


def versions() -> dict[str, str]:
    """Return package -> installed version, with Python's; packages that are not installed are left out."""
    packages = {package: found for package in PACKAGES if (found := installed(package)) is not None}
    return {"python": platform.python_version(), **packages}


def git_commit(folder: Path) -> str | None:
    """Return the commit of ``folder``, with ``+changes`` if tracked files differ from it; None outside a
    repository or without git."""
    try:
        describe = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return describe.stdout.strip()
