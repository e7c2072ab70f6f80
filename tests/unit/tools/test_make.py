"""What make installs where."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.tiny import ROOT


@pytest.mark.parametrize(("gpu", "requirements"), [("1", "requirements.txt"), ("0", "requirements/cpu.txt")])
def test_a_login_node_installs_what_its_jobs_need(gpu, requirements):
    """GPU says so, whatever this machine has; nothing is installed here."""
    told = subprocess.run(
        ["make", "--dry-run", "--always-make", "--no-print-directory", "venv", f"GPU={gpu}"],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if not key.startswith("MAKE")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.splitlines()[0] == f"tools/venv.sh {requirements}"


@pytest.mark.parametrize(("gpu", "wanted"), [("1", "yes"), ("0", "no")])
def test_the_installer_takes_the_build_that_it_is_told(gpu, wanted):
    script = (ROOT / "tools" / "venv.sh").read_text()
    function = next(line for line in script.splitlines() if line.startswith("wants_gpu()"))
    told = subprocess.run(
        ["bash", "-c", f"{function}; wants_gpu && echo yes || echo no"],
        env={"GPU": gpu, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == wanted
