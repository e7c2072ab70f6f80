"""The releases that are accepted: others are refused with what to install."""

from __future__ import annotations

import pytest

from common.versions import ACCEPTED, refusal
from models import distributed


def test_a_release_is_accepted_or_refused():
    assert [refusal("torch", found) for found in ("2.13.0+cpu", "2.11.0a0+d7b4.nv26.02")] == [None, None]
    for package, found in (("torch", "2.10.1"), ("torch", "2.14.0a0"), ("torch", "3.0"), ("vllm", "0.33.0")):
        said = str(refusal(package, found))
        assert f"is {package} {found}" in said and str(ACCEPTED[package]) in said


def test_another_torch_is_refused_before_ranks_meet(monkeypatch):
    monkeypatch.setattr(distributed.torch, "__version__", "2.10.0")
    with pytest.raises(distributed.UserError, match=r"torch 2\.10\.0; accepted is .*: install torch==2"):
        distributed.start()
