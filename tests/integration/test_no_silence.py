"""On a terminal no program computes three seconds in silence, and a request to stop is answered early."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
TICK, HANG_S = 0.1, 120.0
SMALL = ("n_eval_examples=4", "n_eval_prompts=4", "model.batch_size=4")
ROUNDS = ("online=true", "humanline=true", "rounds.contexts=8", "rounds.contexts_per_round=8")
ROUNDS += ("rounds.samples=4",)


class Terminal:
    """A program on a pseudo-terminal: what it prints, and how long it was silent at most."""

    def __init__(self, folder: Path, *words: str) -> None:
        mine, theirs = pty.openpty()
        places = ("exp_name=quiet", f"runs_dir={folder}/runs", f"cache_dir={folder}/cache")
        self.process = subprocess.Popen(
            [sys.executable, "train.py", "loss=dpo", *SMALL, *places, *words],
            cwd=ROOT,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "120"},
        )
        os.close(theirs)
        self.end, self.text, self.longest, self.silent_after = mine, "", 0.0, ""

    def cpu_seconds(self) -> float:
        """What the program and its processes have computed so far. On a busy machine they wait, which is not
        their silence."""
        spent = 0.0
        with suppress(psutil.Error):
            own = psutil.Process(self.process.pid)
            for each in (own, *own.children(recursive=True)):
                with suppress(psutil.Error):
                    spent += sum(each.cpu_times()[:2])
        return spent

    def read(self, until: str = "nothing that is printed") -> None:
        """Read until the text comes, or the program ends."""
        spoke, heard = self.cpu_seconds(), time.monotonic()
        while time.monotonic() - heard < HANG_S:
            if not select.select([self.end], [], [], TICK)[0]:
                if (silent := self.cpu_seconds() - spoke) > self.longest:
                    self.longest, self.silent_after = silent, self.text[-200:]
                continue
            try:
                part = os.read(self.end, 65536)
            except OSError:  # the program has closed the terminal
                part = b""
            if not part:
                self.process.wait()
                return
            self.text += part.decode(errors="replace")
            if until in self.text:
                return
            spoke, heard = self.cpu_seconds(), time.monotonic()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.end)


@pytest.mark.parametrize("asked", [False, True])
def test_no_three_seconds_pass_without_output_and_who_imports_can_be_asked_to_stop(
    tmp_path: Path, asked: bool
) -> None:
    terminal = Terminal(tmp_path, *ROUNDS)
    try:
        if asked:
            terminal.read("import")
            terminal.process.send_signal(signal.SIGTERM)
        terminal.read()
        assert terminal.process.returncode == (75 if asked else 0), terminal.text[-2000:]
        assert ("SIGTERM, in: import" in terminal.text) is asked
        assert terminal.longest < 3.0, f"{terminal.longest:.1f} CPU seconds after {terminal.silent_after!r}"
    finally:
        terminal.close()
