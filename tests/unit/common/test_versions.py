"""The releases that are accepted: others are refused with what to install."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.versions import ACCEPTED, TESTED, refusal
from models import distributed

ROOT = Path(__file__).parents[3]


REFUSED = {"torch": ("2.10.1", "2.14.0a0", "3.0"), "vllm": ("0.30.0", "0.33.0", "1.0.0")}
RELEASES = {"torch": ("2.13.0+cpu", "2.11.0a0+d7b4.nv26.02"), "vllm": ("0.32.1", "0.31.1")}


@pytest.mark.parametrize("package", RELEASES)
def test_a_release_is_accepted_or_refused(package):
    assert [refusal(package, found) for found in RELEASES[package]] == [None, None]
    for found in REFUSED[package]:
        said = str(refusal(package, found))
        assert f"is {package} {found}" in said and str(ACCEPTED[package]) in said


def test_what_is_pinned_is_what_the_tests_run_on():
    for package, file in (("torch", "requirements/cpu.txt"), ("vllm", "requirements.txt")):
        lines = (ROOT / file).read_text().splitlines()
        (pinned,) = [line.partition("==")[2] for line in lines if line.startswith(f"{package}==")]
        assert pinned in TESTED[package] and refusal(package) is None


def test_another_torch_is_refused_before_ranks_meet(monkeypatch):
    monkeypatch.setattr(distributed.torch, "__version__", "2.10.0")
    with pytest.raises(distributed.UserError, match=r"torch 2\.10\.0; accepted is .*: install torch==2"):
        distributed.start()
