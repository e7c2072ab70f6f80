"""A run's settings, versions and commit for other people (tracker, report, model card)."""

from __future__ import annotations

import os
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


def machine() -> dict[str, str]:
    """Return what the bits of a run on a CPU depend on besides its settings: the processor with its widest
    vectors (``avx512f``, ``avx2``) and its instructions for bfloat16 (``avx512_bf16``, ``amx_bf16``), the
    threads, and the versions that compute."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    widest = [flag for flag in ("avx512f", "avx2") if flag in flags][:1]
    used = ", ".join(widest + [flag for flag in ("avx512_bf16", "amx_bf16") if flag in flags])
    threads = os.environ.get("OMP_NUM_THREADS") or str(os.cpu_count())
    own = {name: value for name, value in versions().items() if name in ("python", "torch", "transformers")}
    processor = names[0] if names else platform.machine()
    return {"cpu": f"{processor} ({used})" if used else processor, "threads": threads, **own}


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
