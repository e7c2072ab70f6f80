"""The files of a run's numbers: every step once, or what is missing is said."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import DataError
from reports.metrics import DIAGNOSTICS, METRICS, LineFile, plain, read_metrics, restore
from tests.full_disk import full_disk

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()


def steps(path: Path) -> list[int]:
    return [record["step"] for record in read_metrics(path)]


def filled(path: Path, count: int) -> LineFile:
    file = LineFile(path, fresh=True)
    for step in range(count):
        file.append({"step": step, "loss": step / 7})
    return file


@given(st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
@settings(max_examples=50)
def test_plain_data_are_always_json_and_a_broken_line_is_named(tmp_path_factory, value):
    json.dumps(plain(value), allow_nan=False)
    path = tmp_path_factory.mktemp("run") / METRICS
    path.write_text('{"step": 0}\n{"loss": 1}\n{"step": 2}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2"):
        read_metrics(path)


# -- room ------------------------------------------------------------------------------------------


@given(room=st.integers(0, 300), count=st.integers(1, 12))
@settings(max_examples=40)
def test_lines_without_room_wait_and_are_written_when_there_is_some(tmp_path_factory, room, count):
    path = tmp_path_factory.mktemp("run") / METRICS
    file = LineFile(path, fresh=True)
    with full_disk(room), contextlib.redirect_stdout(io.StringIO()):  # pytest's own capture is a file
        for step in range(count):
            file.append({"step": step, "loss": step / 7})
            assert path.read_bytes()[-1:] in (b"", b"\n") and steps(path) == list(range(len(steps(path))))
    file.settle()
    assert steps(path) == list(range(count))
    file.append({"step": count, "loss": 0.0})
    file.close()
    assert steps(path) == list(range(count + 1))


# -- going on --------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["none", "torn", "zeroed", "removed", "garbled", "shuffled"])
def test_a_run_that_goes_on_has_the_lines_of_its_checkpoint_whatever_became_of_its_file(tmp_path, damage):
    (checkpoint := tmp_path / "checkpoint").mkdir()
    path, before = tmp_path / METRICS, 3
    file = filled(path, before)
    file.copy_to(checkpoint)
    for step in range(before, before + 2):
        file.append({"step": step})
    file.close()
    content = path.read_bytes()
    changed = {
        "none": content,
        "torn": content + b'{"step": 99, "lo',  # kill -9 in the middle of a write
        "zeroed": b"",
        "removed": b"",
        "garbled": b"\0" * len(content),
        "shuffled": b"".join(reversed(content.splitlines(True))),
    }[damage]
    path.write_bytes(changed)
    if damage == "removed":
        path.unlink()
    restore(tmp_path, checkpoint, before)
    assert path.read_bytes() == (checkpoint / METRICS).read_bytes()
    as_left = changed.startswith((checkpoint / METRICS).read_bytes())
    kept = tmp_path / f"{METRICS}.damaged"
    assert kept.exists() == (not as_left and changed != b"")
    assert not kept.exists() or kept.read_bytes() == changed
    again = LineFile(path, fresh=False)
    again.append({"step": before})
    again.close()
    assert steps(path) == list(range(before + 1))


def test_an_unfinished_interval_has_no_line_after_going_on_and_from_its_start_nothing_has(tmp_path):
    """Diagnostics, asked to stop before step 4, gone on with, and killed once the interval's line was
    written."""
    (tmp_path / "checkpoint").mkdir()
    file, metrics = LineFile(tmp_path / DIAGNOSTICS, fresh=True), LineFile(tmp_path / METRICS, fresh=True)
    for line in ({"step": -1}, {"step": 1, "first_step": 0}):
        file.append(line)
    metrics.append({"step": 0})
    for one in (file, metrics):
        one.copy_to(tmp_path / "checkpoint")
    file.append({"step": 3, "first_step": 2})
    restore(tmp_path, tmp_path / "checkpoint", 4)
    assert steps(tmp_path / DIAGNOSTICS) == [-1, 1] and steps(tmp_path / METRICS) == [0]
    restore(tmp_path, tmp_path / "checkpoint", 0)
    assert steps(tmp_path / METRICS) == steps(tmp_path / DIAGNOSTICS) == []
