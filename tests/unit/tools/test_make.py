"""What make installs where."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def stand_in(folder: Path, name: str, loop: int, *, complete: bool = True) -> Path:
    """This Python, but for how long its loop takes, and whether it can make an environment."""
    path = folder / name
    path.write_text(
        f"""#!/bin/bash
case "$2" in
    *process_time*) echo {loop} ;;
    *ensurepip*) exit {int(not complete)} ;;
    *) exec {sys.executable} "$@" ;;
esac
"""
    )
    path.chmod(0o755)
    return path


def chosen(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    functions = SCRIPT[SCRIPT.index("new_enough()") : SCRIPT.index("# A folder that was copied")]
    env = {"PATH": f"{folder}:/usr/bin:/bin", **environment}
    return run(["bash", "-c", f"{functions}\nfind_python"], env)


@pytest.mark.parametrize(
    ("first", "system", "complete", "taken"),
    [(1600, 1000, True, "system"), (1200, 1000, True, "python3"), (1600, 1000, False, "python3")],
)
def test_the_systems_python_is_taken_where_it_is_much_faster(tmp_path, first, system, complete, taken):
    stand_in(tmp_path, "python3", first)
    other = stand_in(tmp_path, "system", system, complete=complete)
    told = chosen(tmp_path, SYSTEM_PYTHONS=str(other))
    assert told.stdout.strip() == str(tmp_path / taken)
    assert (f"PYTHON={tmp_path / 'python3'} takes the first" in told.stderr) == (taken == "system")
    asked = chosen(tmp_path, SYSTEM_PYTHONS=str(other), PYTHON="python3")
    assert asked.stdout.strip() == str(tmp_path / "python3") and asked.stderr == ""
