"""What make installs where, and the lock of it."""

from __future__ import annotations

import os
import re
import subprocess

import pytest
from packaging.requirements import Requirement

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


def test_the_lock_is_of_the_lists_and_every_package_in_it_has_its_hash():
    """What make lock has to be run again for."""
    blocks = re.findall(r"^\w.*(?:\n    .*)*", (ROOT / "requirements" / "gpu.lock").read_text(), re.M)
    assert all("--hash=sha256:" in block for block in blocks)
    locked = [re.match(r"(\S+)==(\S+)", block).groups() for block in blocks]
    lists = [(ROOT / name).read_text() for name in ("requirements.txt", "requirements/cpu.txt")]
    for line in re.findall(r"^\w.*", "\n".join(lists), re.M):
        wanted = Requirement(line.partition("#")[0])
        versions = [version for name, version in locked if name == wanted.name]
        assert versions and all(version in wanted.specifier for version in versions), line
