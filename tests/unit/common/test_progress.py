"""What programs print: where it cannot be written, and progress in a log file and on a terminal."""

from __future__ import annotations

import io
import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from common import progress as module
from common.files import write_whole
from common.progress import progress
from config.cli import STOPPED, guarded
from reports.evaluations import status
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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _always_due(monkeypatch):
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(module, "SECONDS_BETWEEN_REDRAWS", 0.0)


def run(stream: io.StringIO) -> str:
    shown = {"lr": 5e-6, "tokens_per_second": 1234.5, "gpu_memory_gib": 3.04}
    with progress(6, "train", done=2, stream=stream) as bar:
        for step in range(2, 6):
            bar.set_postfix_str(status({"step": step, "loss": step / 10, **shown}), refresh=False)
            bar.update()
    return stream.getvalue()


def test_a_log_file_gets_whole_lines_and_a_terminal_one_line_redrawn():
    lines = run(io.StringIO()).split("\n")
    assert lines.pop() == ""
    assert "\r" not in "".join(lines)
    assert [line.split(",")[0] for line in lines] == [f"train: {n}/6 steps" for n in range(2, 7)]
    assert lines[-1].endswith("loss 0.5000, lr 5.00e-06, 1,234 tokens/s, 3.0 GiB")
    text = run(Terminal())
    assert text.count("\n") == 1
    assert "6/6" in text.split("\r")[-1] and "loss 0.5000" in text.split("\r")[-1]


@pytest.mark.parametrize("seed", range(8))
def test_the_time_left_is_steady_on_steps_of_uneven_lengths(seed: int) -> None:
    """A clock by hand: steps of 5 to 40 seconds, in proportion to their tokens, looked at every second. The
    long ones may come first."""
    draw = random.Random(seed)
    tokens = sorted((draw.randint(100, 800) for _ in range(60)), reverse=seed % 2 == 0)
    now, seen = 0.0, []
    with progress(60, "train", stream=io.StringIO()) as bar:
        bar._time, bar.start_t = lambda: now, 0.0
        bar.wait()
        bar.weigh(tokens)
        for step, count in enumerate(tokens):
            if step == 1:
                bar.measure()
            for _ in range(count // 20):
                now += 1.0
                fields = bar.format_dict
                if now > 60 and step > 1 and fields["rate"]:
                    seen.append((fields["total"] - fields["n"]) / fields["rate"])
            bar.update()
    assert all(0.5 < after / before < 2 for before, after in itertools.pairwise(seen) if before > 60)
    first, length = seen[0], len(seen)
    assert 0.5 < first / length < 2
    assert all(1 / 2 < left / (length - i) < 2 for i, left in enumerate(seen) if length - i > 60)


def test_the_seconds_of_a_start_are_said_once_each_by_what_was_shown(monkeypatch) -> None:
    monkeypatch.setattr(module.Bar, "opened", [])  # what another test has left open is none of them
    module.Bar.spent.clear()
    now = 0.0
    with progress(2, "outer (a)", stream=io.StringIO()) as outer:
        outer._time, outer.start_t = lambda: now, 0.0
        with progress(1, "inner (b)", stream=io.StringIO()) as inner:
            inner._time, inner.start_t = lambda: now, 0.0
            now = 7.0
        now = 10.0
        with progress(1, "train (c)", stream=io.StringIO()) as train:
            train._time, train.start_t = lambda: now, 10.0
            now = 15.0
            assert module.seconds_so_far() == "7 inner (b), 5 train (c), 3 outer (a)"
