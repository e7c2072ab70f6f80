"""``answers.jsonl`` of a run, which has the answers to the same prompts before, during and after training,
for people to read.

Each line is ``{"step", "kind", "prompt", "answer", "reference", "verdict"}``, where ``kind`` is sampled or
greedy, or read for a greedy answer that nothing judges.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.files import write_whole

FILE = "answers.jsonl"
KEYS = {"step", "kind", "prompt", "answer", "reference", "verdict"}
SHOWN, LINES = 4, 3
"""Number of prompts whose answers the report, and terminal and model card, show: the first ones, good or
bad."""
_MOST_CHARACTERS = 160
ABSENT = "–"


@dataclass(frozen=True)
class Answered:
    """One prompt's answers before and after training."""

    kind: str
    prompt: str
    reference: str
    before: str
    after: str

    def title(self, prompt: str) -> str:
        """What the answers to ``prompt``, as it is shown, are called."""
        return (
            f"greedy answer to {prompt}"
            if self.kind == "read"
            else f"{self.kind} answer to {prompt}, with its verdict"
        )


def keep_answers(run_dir: Path, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Add the answers given before ``step``. Lines of this step and of later ones, which a killed run may
    have left, are removed. So are damaged lines, and that is printed. Raises OSError."""
    path = run_dir / FILE
    sound, damaged = _lines(path)
    if damaged:
        print(f"{path}: {damaged} of its lines are damaged, and go; the others stay", flush=True)
    earlier = [line for line in sound if line["step"] < step]
    lines = [*earlier, *({"step": step, **dict(zip(columns, row, strict=True))} for row in rows)]
    write_whole(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def copy_answers(run_dir: Path, folder: Path) -> None:
    """Copy the file into a checkpoint's ``folder``, if there is one. Raises OSError."""
    if (run_dir / FILE).is_file():
        shutil.copyfile(run_dir / FILE, folder / FILE)


def read_answers(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file without damaged ones; [] if the file cannot be read, because the answers are
    only for reading."""
    try:
        return _lines(path)[0]
    except OSError:
        return []


def _lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return (the sound lines of a file, the number of damaged ones). Raises OSError."""
    sound, damaged = [], 0
    for text in path.read_bytes().splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        if isinstance(line, dict) and line.keys() >= KEYS and isinstance(line["step"], int):
            sound.append(line)
        else:
            damaged += 1
    return sound, damaged


def before_and_after(run_dir: Path) -> list[Answered]:
    """Return the greedy answers to the first prompts before and after training, those that nothing judges, or
    the sampled answers if there are no greedy ones. A run that was evaluated once has none after training."""
    lines = read_answers(run_dir / FILE)
    for kind in ("greedy", "read", "sampled"):
        same_kind = [line for line in lines if line["kind"] == kind]
        if same_kind:
            ends = [end(line["step"] for line in same_kind) for end in (min, max)]
            first, last = ([line for line in same_kind if line["step"] == step] for step in ends)
            after = {line["prompt"]: line for line in reversed(last)} if ends[0] < ends[1] else {}
            once = {line["prompt"]: line for line in reversed(first) if line["prompt"] in after or not after}
            return [_answered(once[p], after.get(p)) for p in list(reversed(once))[:SHOWN]]
    return []


def _answered(before: dict[str, Any], after: dict[str, Any] | None) -> Answered:
    reference = "" if before["reference"] is None else str(before["reference"])
    later = ABSENT if after is None else text_of(after)
    return Answered(before["kind"], before["prompt"], reference, text_of(before), later)


def text_of(line: dict[str, Any]) -> str:
    """Return an answer with its verdict, if it was to get one."""
    if line["kind"] == "read":
        return str(line["answer"])
    verdict = "no verdict" if line["verdict"] is None else f"{round(line['verdict'], 3):g}"
    return f"{line['answer']} ({verdict})"


def example_lines(run_dir: Path) -> list[str]:
    """Return the first prompts' answers as lines for the terminal."""
    answers = before_and_after(run_dir)[:LINES]
    return [
        line
        for one in answers
        for line in (
            one.title(repr(shortened(one.prompt))),
            f"  before  {shortened(one.before)}",
            f"  after   {shortened(one.after)}",
        )
    ]


def shortened(text: str, most: int = _MOST_CHARACTERS) -> str:
    """Return the text on one line; beyond ``most`` characters its middle goes: a verdict is at the end."""
    line = " ".join(text.split())
    half = most // 2
    return line if len(line) <= most else f"{line[:half]} … {line[-half:]}"
