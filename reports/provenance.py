"""A run's settings, versions and commit for other people (tracker, report, model card), without secrets."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from common.secrets import REMOVED, is_secret, named_secrets, scrub_text
from config import variant as variants

__all__ = ["REMOVED", "git_commit", "scrub", "scrub_text", "variant", "versions"]

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft", "vllm")


def scrub(config: Any, named: list[str] | None = None) -> Any:
    """Return a copy of nested plain data with secrets replaced. A secret is recognized by the name of its key
    (``*_key``, ``token`` …) or by its look; ``named`` is that of ``scrub_text``.

    ``tokenizer_name_or_path``, ``max_tokens`` and revisions (40 hex digits) are not secrets and stay.
    """
    named = named_secrets() if named is None else named
    if isinstance(config, dict):
        return {
            scrub_text(key, named) if isinstance(key, str) else key: REMOVED
            if isinstance(key, str) and is_secret(key, value)
            else scrub(value, named)
            for key, value in config.items()
        }
    if isinstance(config, list | tuple):
        return [scrub(value, named) for value in config]
    return scrub_text(config, named) if isinstance(config, str) else config


def variant(config: dict[str, Any]) -> str:
    """Return which of the paper's four variants a saved config (config.yaml) is."""
    return variants.variant(
        bool(config.get("online")), bool(config.get("humanline")), config.get("sync_mode")
    )


def versions() -> dict[str, str]:
    """Return package -> installed version, with Python's; packages that are not installed are left out."""
    found = {package: installed for package in PACKAGES if (installed := _installed(package)) is not None}
    return {"python": platform.python_version(), **found}


@cache
def _installed(package: str) -> str | None:
    """Return the version of a package, read once: a run asks several times, and its files are parsed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


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
