"""Groups that do not fit in memory wait in a file, and are the same groups."""

from __future__ import annotations

import os
import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.group_store import FileGroups, gathered, picked, prompt_ids
from data.types import Completion, Group, Prompt, Turn
from tests import programs


def group(i: int) -> Group:
    prompt = Prompt((Turn("system", "s"), Turn("user", f"question {i}")), f"{i}" if i % 2 else None)
    sampled = Completion(None, (i, i + 1), False, "abc", (-0.5, float(i)), loss_mask=(True, False))
    return Group(prompt, (Completion(f"é{i}"), sampled), (1.0, i / 3), f"file.jsonl, row {i}")


def told(groups: object) -> list[object]:
    """Everything of groups, what equality leaves out among it."""
    return [
        (g, g.place, [(c.tokenizer, c.behavior_logprobs, c.behavior_temperature) for c in g.completions])
        for g in groups  # type: ignore[attr-defined]
    ]


@settings(max_examples=25)
@given(st.integers(0, 30), st.integers(0, 30), st.data())
def test_in_a_file_groups_are_what_they_are_in_memory(count, most, data):
    want = [group(i % 7) for i in range(count)]
    found = gathered(iter(want), most)
    assert isinstance(found, FileGroups) == (count > most)
    assert len(found) == count and told(found) == told(want)
    chosen = np.array(data.draw(st.lists(st.integers(0, count - 1)) if count else st.just([])), np.int64)
    some = picked(found, chosen)
    assert told(some) == told([want[i] for i in chosen])
    assert told(some[1:5:2]) == told([want[i] for i in chosen][1:5:2])
    assert prompt_ids(some).tolist() == [want[i].prompt.id.encode() for i in chosen]


def test_what_is_picked_outlives_what_it_was_picked_from_and_is_read_by_forks():
    some = picked(gathered((group(i) for i in range(50)), 10), np.array([40, 3]))
    if (child := os.fork()) == 0:
        os._exit(0 if some[0] == group(40) else 1)
    assert some[1] == group(3) and os.waitpid(child, 0)[1] == 0


def test_the_file_has_no_name(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = gathered((group(i) for i in range(50)), 10)
    assert list(tmp_path.iterdir()) == [] and found[49] == group(49)


LIMITED = """
import resource, tempfile
tempfile.tempdir = None  # as in a new process
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, most))
from common.errors import DataError
from data.group_store import gathered
from tests.unit.data.test_group_store import group
try:
    gathered((group(i) for i in range(30_000)), 10)
except DataError as error:
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))  # its output may be a file
    print(error)
"""


@pytest.mark.parametrize("room", [1 << 20, 0])
def test_where_there_is_no_room_the_folder_is_named(room):
    """Also where not even the first byte can be written, so that Python finds no folder to use."""
    done = programs.run("-c", LIMITED.format(room=room))
    assert tempfile.gettempdir() in done.stdout and "set TMPDIR" in done.stdout, done.stderr
