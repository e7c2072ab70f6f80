"""What programs do where what they print cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.files import write_whole
from config.cli import STOPPED, guarded
from tests.full_disk import full_disk

ROOT = Path(__file__).parents[3]
START = """
import sys
from common.errors import ConfigError
from config.cli import guarded
"""
PRINTS = """
import resource, sys
from common.output import guard_output
if sys.argv[1] == "forgiving":
    guard_output()
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, most))
for number in range(100):
    print(f"line {number} of a log that is full", flush=True)
    print(f"warning {number}", file=sys.stderr)
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
print("the last line")
"""


@pytest.mark.parametrize("kind", ["forgiving", "as it is"])
def test_a_log_that_is_full_ends_no_program(tmp_path, kind):
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        done = subprocess.run(
            [sys.executable, "-c", PRINTS, kind], cwd=ROOT, stdout=out, stderr=err, check=False, timeout=900
        )
    lines = (tmp_path / "out").read_text().splitlines()
    assert lines[0] == "line 0 of a log that is full"
    if kind == "forgiving":
        assert done.returncode == 0 and lines[-1].endswith("the last line") and len(lines) < 100
        assert (tmp_path / "err").read_text().splitlines() == [f"warning {n}" for n in range(100)]
    else:
        assert done.returncode != 0, "the fault that is forgiven"


def test_output_has_a_limit(tmp_path):
    prints = "from common.output import *; guard_output(1000)\nfor n in range(500): print('line', n)"
    with (tmp_path / "out").open("wb") as out:
        subprocess.run([sys.executable, "-c", prints], cwd=ROOT, stdout=out, check=True, timeout=900)
    lines = (tmp_path / "out").read_text().splitlines()
    assert lines[:2] == ["line 0", "line 1"] and lines[-1].endswith("the rest is dropped]")
    assert (tmp_path / "out").stat().st_size < 1100


BOTH = "(sys.stdout, sys.stderr)"
ENDS = {
    0: f"guarded(lambda: [print('β … 🙂', n, file=out) for n in range(3000) for out in {BOTH}])",
    2: "def work(): raise ConfigError('lr', 'β', 'no')\nguarded(work)",
}
PLACES = {
    "latin-1": ("{} 2>&1", {"PYTHONIOENCODING": "latin-1"}, "\\u03b2"),
    "gbk": ("{} 2>&1", {"PYTHONIOENCODING": "gbk"}, "β"),
    "posix": ("{} 2>&1", {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, "\\u03b2"),
    "closed pipe": ("{} 2>&1 | head -1", {}, "β"),
    "closed at the start": ("{} >&-", {}, ""),
    "both closed": ("{} >&- 2>&-", {}, ""),
    "full": ("{} >/dev/full 2>/dev/full", {}, ""),
    "only to read": ("{} 1</dev/null 2</dev/null", {}, ""),
}


@pytest.mark.parametrize(
    ("place", "code"),
    [*((place, 0) for place in PLACES), ("latin-1", 2), ("closed at the start", 2), ("full", 2)],
)
def test_no_output_ends_a_program_or_changes_its_code(tmp_path, place, code):
    line, env, first = PLACES[place]
    program = tmp_path / "program.py"
    program.write_text(f"# coding: utf-8\n{START}{ENDS[code]}\n", encoding="utf-8")
    typed = line.format(f"{{ {sys.executable} {program}; echo $? >{tmp_path}/code; }}")
    done = subprocess.run(
        ["bash", "-c", typed],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
        capture_output=True,
        check=False,
        timeout=900,
    )
    ended = int((tmp_path / "code").read_text())
    said = done.stdout.decode(env.get("PYTHONIOENCODING", "utf-8"))
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

    def other() -> None:
        (tmp_path / "none" / "file").write_bytes(b"x")

    with pytest.raises(FileNotFoundError):
        guarded(other)
