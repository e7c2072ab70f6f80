"""What make installs where."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from tests.tiny import ROOT

SCRIPT = (ROOT / "tools" / "venv.sh").read_text()


def run(words: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=True)


@pytest.mark.parametrize(
    ("gpu", "requirements", "wanted"), [("1", "requirements.txt", "yes"), ("0", "requirements/cpu.txt", "no")]
)
def test_a_login_node_installs_what_its_jobs_need(gpu, requirements, wanted):
    """GPU says so, whatever this machine has; nothing is installed here."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    done = run(["make", "--dry-run", "--always-make", "--no-print-directory", "venv", f"GPU={gpu}"], env)
    assert done.stdout.splitlines()[0] == f"tools/venv.sh {requirements}"
    function = next(line for line in SCRIPT.splitlines() if line.startswith("wants_gpu()"))
    words = ["bash", "-c", f"{function}; wants_gpu && echo yes || echo no"]
    assert run(words, {"GPU": gpu, "PATH": "/usr/bin:/bin"}).stdout.strip() == wanted


@pytest.mark.parametrize("status", [0, 3])
def test_an_install_is_seen_while_it_lasts(tmp_path, status):
    """In a log by its last line again and again. It ends as pip does."""
    pip = tmp_path / "pip"
    pip.write_text(f'#!/bin/bash\necho "Downloading $*"; echo no news: 404 >&2; sleep 1.3; exit {status}\n')
    pip.chmod(0o755)
    functions = SCRIPT[SCRIPT.index("# Repeats the last") : SCRIPT.index("if ! usable")]
    env = {"PATH": "/usr/bin:/bin", "VENV_PYTHON": str(pip), "PIP_LOG": str(tmp_path / "pip.log")}
    words = ["bash", "-c", f"set -euo pipefail\n{functions}\npip_install torch"]
    env |= {"NO_NEWS": "no news", "SAY_EVERY": "0.4"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == status and done.stderr == ""
    said = done.stdout.splitlines()
    assert len(said) >= 2
    assert all(
        re.fullmatch(r"  \d s: Downloading -m pip install .* torch --progress-bar off", one) for one in said
    )
