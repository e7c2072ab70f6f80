"""What a run is, told to other people (tracker, report, model card) without telling them a secret."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from config import variant as variants

REMOVED = "[removed]"
_SECRET_NAME = re.compile(r"(^|[_.\-])(key|apikey|token|secret|passw(or)?d|credentials?)$", re.IGNORECASE)
_SECRET_VALUE = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|\bwandb_v\d+_[A-Za-z0-9_\-]{16,}"  # Weights & Biases; its older keys are bare hex like a commit: known by their names alone
    r"|\bsk-[A-Za-z0-9_\-]{16,}"  # OpenAI and those who followed
    r"|\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_[A-Za-z0-9_]{16,}"
    r"|(?<=://)[^/\s@]+:[^/\s@]+(?=@)"  # user:password in a URL
)
_SHORTEST_SECRET = 8
"""Characters: a shorter environment value is more likely a word than a secret, and would be cut out of ordinary text."""

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft", "vllm")


def scrub_text(text: str) -> str:
    """``text`` without anything shaped like a token, and without the value of any environment variable named like a secret."""
    named = (v for k, v in os.environ.items() if _SECRET_NAME.search(k) and len(v) >= _SHORTEST_SECRET)
    for value in sorted(named, key=len, reverse=True):  # longest first: one may hold another
        text = text.replace(value, REMOVED)
    return _SECRET_VALUE.sub(REMOVED, text)


def scrub(config: Any) -> Any:
    """A copy of nested plain data with secrets replaced: known by the name of their key (``*_key``, ``token`` …) or by their look.

    ``tokenizer_name_or_path``, ``max_tokens`` and revisions (40 hex digits) are no secrets and stay.
    """
    if isinstance(config, dict):
        return {
            scrub_text(key) if isinstance(key, str) else key: REMOVED
            if isinstance(key, str) and _SECRET_NAME.search(key) and isinstance(value, str) and value
            else scrub(value)
            for key, value in config.items()
        }
    if isinstance(config, list | tuple):
        return [scrub(value) for value in config]
    return scrub_text(config) if isinstance(config, str) else config


def variant(config: dict[str, Any]) -> str:
    """Which of the paper's four variants a saved config (config.yaml) is."""
    return variants.variant(
        bool(config.get("online")), bool(config.get("humanline")), config.get("sync_mode")
    )


def versions() -> dict[str, str]:
    """Package -> installed version, Python's included; packages that are not installed are left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git_commit(folder: Path) -> str | None:
    """The commit of ``folder``, with ``+changes`` where tracked files differ from it; None outside a repository or without git."""
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
