"""A run that is killed while sampling, while scoring and while training, and resumed each time, ends with the
very same weights."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import programs
from tests.integration.online import SHORT, function, lines, rounds
from tests.programs import Program

COMMAND = (
    "train.py",
    *SHORT,
    "rounds.contexts=48",
    "rounds.contexts_per_round=16",
    "online=true",
    "humanline=true",
    "sync_freq=2",
    "loss=kto",
    "resume=true",
    *function("slow"),
)


def start(folder: Path, slow: int = 0) -> Program:
    words = [*COMMAND, f"runs_dir={folder}", f"cache_dir={folder}/cache", "exp_name=r"]
    return programs.start(*words, env={"SLOW_REWARD": str(slow)})


def kill_when(process: Program, reached: Callable[[], bool]) -> None:
    while not reached():
        assert process.poll() is None, process.said()[-2000:]
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


@pytest.mark.slow
def test_killed_in_every_stage(tmp_path):
    whole = start(tmp_path / "whole")
    assert whole.wait() == 0, whole.said()[-2000:]
    run = tmp_path / "killed" / "r"
    second = run / "rounds" / "001"

    kill_when(start(tmp_path / "killed"), (second / "round.json").exists)
    assert not (second / "samples.jsonl").exists(), "killed too late to be sampling"

    kill_when(start(tmp_path / "killed", slow=60), (second / "samples.jsonl").exists)
    assert not (second / "scores.jsonl").exists()
    sampled = (second / "samples.jsonl").stat().st_mtime_ns

    kill_when(start(tmp_path / "killed"), lambda: any(line["round"] == 1 for line in lines(run)))
    assert not (run / "rounds" / "002" / "groups.jsonl").exists(), "killed too late to be training on round 1"

    last = start(tmp_path / "killed")
    assert last.wait() == 0, last.said()[-2000:]
    assert (second / "samples.jsonl").stat().st_mtime_ns == sampled, "what was on disk was sampled again"
    undisturbed = tmp_path / "whole" / "r"
    assert (run / "model/model.safetensors").read_bytes() == (
        undisturbed / "model/model.safetensors"
    ).read_bytes()
    for a, b in zip(rounds(run), rounds(undisturbed), strict=True):
        assert [a.file(s).read_bytes() for s in ("samples", "scores", "groups")] == [
            b.file(s).read_bytes() for s in ("samples", "scores", "groups")
        ]
    numbers = (
        "step",
        "round",
        "reference_step",
        "loss",
        "grad_norm",
        "kl",
        "clipped_low",
        "clipped_high",
        "lr",
        "examples",
        "tokens",
    )
    assert [[x[key] for key in numbers] for x in lines(run)] == [
        [x[key] for key in numbers] for x in lines(undisturbed)
    ]
