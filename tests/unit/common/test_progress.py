"""What programs print: where it cannot be written, and progress in a log file and on a terminal."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.files import write_whole
from common.progress import progress
from config.cli import STOPPED, guarded
from tests.full_disk import full_disk

ROOT = Path(__file__).parents[3]
START = """
import sys
from common.errors import ConfigError
from config.cli import guarded
"""

BOTH = "(sys.stdout, sys.stderr)"
ENDS = {
    0: f"guarded(lambda: [print('β … 🙂', n, file=out) for n in range(3000) for out in {BOTH}])",
    2: "def work(): raise ConfigError('lr', 'β', 'no')\nguarded(work)",
}
PLACES = {
    "posix": ("{} 2>&1", {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, "\\u03b2"),
    "closed pipe": ("{} 2>&1 | head -1", {}, "β"),
    "both closed": ("{} >&- 2>&-", {}, ""),
    "full": ("{} >/dev/full 2>/dev/full", {}, ""),
}


@pytest.mark.parametrize(("place", "code"), [*((place, 0) for place in PLACES), ("full", 2)])
def test_no_output_ends_a_program_or_changes_its_code(tmp_path, place, code):
    line, env, first = PLACES[place]
    program = tmp_path / "program.py"
    program.write_text(f"# coding: utf-8\n{START}{ENDS[code]}\n", encoding="utf-8")
    typed = line.format(f"{{ {sys.executable} {program}; echo $? >{tmp_path}/code; }}")
    full = os.environ | {"PYTHONPATH": str(ROOT)} | env
    done = subprocess.run(["bash", "-c", typed], cwd=ROOT, env=full, capture_output=True, timeout=900)
    ended = int((tmp_path / "code").read_text())
    said = done.stdout.decode()
    assert ended == code and "Traceback" not in said + done.stderr.decode(errors="replace"), said
    assert not first or first in said.splitlines()[0]


def test_a_file_without_room_ends_a_program_with_one_message(tmp_path, capsys):
    def work() -> None:
        write_whole(tmp_path / "file", "x" * 100)

    with full_disk(10), pytest.raises(SystemExit) as left:
        guarded(work)
    assert left.value.code == STOPPED
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "File too large" in said and said.count("\n") == 1
    assert f"{tmp_path / 'file'}' (disk /" in said
    with pytest.raises(FileNotFoundError):
        guarded(lambda: (tmp_path / "none" / "file").write_bytes(b"x"))


def test_the_time_left_is_in_proportion_to_the_tokens_of_the_steps_to_come() -> None:
    """A clock by hand. What is under way counts as if it took the mean."""
    now = 0.0
    with progress(4, "train", stream=io.StringIO()) as bar:
        bar._time, bar.start_t = lambda: now, 0.0
        bar.weigh([100, 100, 200, 600])
        for seconds in (10.0, 10.0, 20.0):
            now += seconds
            bar.update()
        left = (bar.total - bar.n) / bar.format_dict["rate"]
        now += 10.0
        later = (bar.total - bar.n) / bar.format_dict["rate"]
    assert (left, later) == (60.0, 50.0)
