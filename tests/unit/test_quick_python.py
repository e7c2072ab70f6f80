"""What is forked from one process has nothing of it that two processes may not have in common."""

from __future__ import annotations

import contextlib
import os
import subprocess

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


def test_it_does_not_matter_how_many_files_are_open():
    """More than ``select`` can look at, which the many tests of one process leave behind between them."""
    with contextlib.ExitStack() as stack:
        for _ in range(1100):
            stack.enter_context(open(os.devnull))
        assert programs.run("-c", "print('said')", timeout=60).stdout == "said\n"


def test_files_that_are_handed_over_keep_their_numbers(tmp_path):
    """Those that a program gets are put aside first, and not where one of them belongs."""
    numbers = [516, 517, 518, 1100]
    for number in numbers:
        file = os.open(tmp_path / str(number), os.O_CREAT | os.O_WRONLY)
        os.dup2(file, number)
        os.close(file)
    code = f"import os\nfor n in {numbers}: os.write(n, str(n).encode())"
    try:
        subprocess.run([programs.quick_python().python, "-c", code], pass_fds=numbers, check=True, timeout=60)
    finally:
        for number in numbers:
            os.close(number)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {str(n): str(n) for n in numbers}
