"""What programs say where nothing can be written any more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from config.cli import STOPPED, guarded
from tests.full_disk import full_disk

ROOT = Path(__file__).parents[3]
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


def test_a_file_without_room_ends_a_program_with_one_message(tmp_path, capsys):
    def work() -> None:
        (tmp_path / "file").write_bytes(b"x" * 100)

    with full_disk(10), pytest.raises(SystemExit) as left:
        guarded(work)
    assert left.value.code == STOPPED
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "File too large" in said and said.count("\n") == 1

    def other() -> None:
        (tmp_path / "none" / "file").write_bytes(b"x")

    with pytest.raises(FileNotFoundError):
        guarded(other)
