"""A run's settings, versions and commit for other people (tracker, report, model card)."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

from common.versions import installed
from config import schema

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft", "vllm")


def variant(config: dict[str, Any]) -> str:
    """Return which of the paper's four variants a saved config (config.yaml) is."""
    return schema.variant(bool(config.get("online")), bool(config.get("humanline")), config.get("sync_mode"))


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
