"""What is forked from one process has nothing of it that two processes may not have in common."""

from __future__ import annotations

from tests import programs

NAMED = """
import random, tempfile, uuid
import torch
from safetensors.torch import save_file

try:
    save_file({"a": torch.zeros(1)}, "/nowhere/a")  # it writes to a name of its own making first
except Exception as error:
    print(error)
print(random.random(), uuid.uuid4(), next(tempfile._get_candidate_names()))
"""
LEFT = "import threading, gc; print(threading.active_count(), gc.isenabled())"


def test_programs_make_up_names_of_their_own():
    first, second = (programs.run("-c", NAMED).stdout.split() for _ in range(2))
    own = [word for word in first if word not in second]
    assert len(own) == 4 and "/nowhere/.tmp" in own[0], first


def test_nothing_runs_beside_a_program():
    assert programs.run("-c", LEFT).stdout.split() == ["1", "True"]
