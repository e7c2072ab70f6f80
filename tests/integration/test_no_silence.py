"""On a terminal no program computes three seconds in silence, and a request to stop is answered in one."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import time
from contextlib import suppress
from math import inf
from pathlib import Path

import psutil
import pytest

from tests.quick_python import PYTHON

ROOT = Path(__file__).parents[2]
REAL = ROOT / "assets/smollm2/model"
TICK, HANG_S = 0.1, 120.0

TINY = ("n_examples=8", "n_eval_examples=4", "n_eval_prompts=4", "model.batch_size=4")
ROUNDS = (
    "rounds.contexts=8",
    "rounds.contexts_per_round=8",
    "rounds.samples=4",
    "n_eval_examples=4",
    "n_eval_prompts=4",
)
MODEL = (
    ("model=smollm2-135m-instruct", "model.max_length=96", "model.max_prompt_length=64")
    if REAL.is_dir()
    else ()
)
TASK = "constraints" if MODEL else "adder"  # a real model's answers to sums differ too seldom to give pairs
COMMANDS = [
    ("train.py", "loss=dpo", "online=true", "humanline=true", f"data={TASK}", *ROUNDS),
    ("sample.py", "data=adder", "limit=4", "rounds.samples=2", "sampler.max_tokens=32"),
]
if MODEL:
    COMMANDS += [
        ("train.py", "loss=dpo", "data=adder", "dry_run=true"),
        ("train.py", "loss=kto", "humanline=true", "data=adder", "model.use_peft=true", *TINY),
        ("train.py", "loss=sft", "data=adder", *TINY),
        ("train.py", "loss=grpo", "data=constraints", "online=true", *ROUNDS),
    ]


class Terminal:
    """A program on a pseudo-terminal: what it prints, and how long it was silent at most."""

    def __init__(self, folder: Path, *words: str) -> None:
        mine, theirs = pty.openpty()
        own = ("out=a.jsonl",) if words[0] == "sample.py" else ("exp_name=quiet",)
        given = [*words, *own, f"runs_dir={folder}/runs", f"cache_dir={folder}/cache"]
        given = [
            word.replace("out=", f"out={folder}/") if word.startswith("out=") else word for word in given
        ]
        self.process = subprocess.Popen(
            [PYTHON, *given],
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

    def read(self, until: str | None = None, within: float = inf) -> bool:
        """Read until the pattern is found (or the program ends); return whether it is, in ``within`` CPU
        seconds."""
        began = spoke = self.cpu_seconds()
        heard = time.monotonic()
        while time.monotonic() - heard < HANG_S and self.cpu_seconds() - began < within:
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
                return until is None
            self.text += part.decode(errors="replace")
            if until is not None and re.search(until, self.text):
                return True
            spoke, heard = self.cpu_seconds(), time.monotonic()
        return False

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.end)


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: "-".join(words[:3]))
def test_no_three_seconds_pass_without_output(tmp_path: Path, words: tuple[str, ...]) -> None:
    terminal = Terminal(tmp_path, words[0], *MODEL, *words[1:])
    try:
        assert terminal.read()
        assert terminal.process.returncode == 0, terminal.text[-2000:]
        assert terminal.longest < 3.0, f"{terminal.longest:.1f} CPU seconds after {terminal.silent_after!r}"
    finally:
        terminal.close()


@pytest.mark.parametrize(
    ("number", "at", "says"),
    [
        (signal.SIGTERM, "import", "SIGTERM, in: import"),
        (signal.SIGINT, r"train: +[1-9]\d?%", "resume=true goes on"),
    ],
)
def test_a_request_to_stop_is_answered_at_once(tmp_path: Path, number: int, at: str, says: str) -> None:
    terminal = Terminal(tmp_path, "train.py", *MODEL, "loss=dpo", "data=adder", *TINY[1:], "n_examples=400")
    try:
        assert terminal.read(at), terminal.text
        terminal.process.send_signal(number)
        assert terminal.read(says, within=1.0), terminal.text
        terminal.read()
        assert terminal.process.returncode == 75
        assert terminal.longest < 3.0, f"{terminal.longest:.1f} CPU seconds after {terminal.silent_after!r}"
    finally:
        terminal.close()
