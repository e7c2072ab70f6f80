"""Torture: one run on two ranks, killed, asked to stop and damaged at random moments, must end like the
undisturbed one.

    python -m tests.distributed.torture --kills 50      # make torture

It writes its checkpoints now while training waits, now behind it (``async_save``). Every step appears exactly
once in metrics.jsonl, and the final weights are equal to the bit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests import programs
from tests.programs import HANG, Program, torchrun

ROOT = Path(__file__).parents[2]
ACTIONS = ("kill everything", "kill a rank", "ask to stop", "kill and damage")


def command(folder: Path, name: str, steps: int, ranks: int, *more: str) -> list[str]:
    return torchrun(
        ranks,
        "train.py",
        "loss=kto",
        "humanline=true",
        "sync_freq=3",
        "resume=true",
        f"exp_name={name}",
        f"runs_dir={folder}",
        f"cache_dir={folder / 'cache'}",
        f"n_examples={4 * steps}",
        "model.batch_size=4",
        "save_every=8",
        "eval_every=32",
        "n_eval_examples=8",
        "lr=1e-3",
        "data.verifier=null",
        "retention.kl=false",
        "diagnostics=false",
        "report=false",
        "wandb.enabled=false",
        "keep_checkpoints=3",
        *more,
    )


def start(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    """``python WORDS``, imports and all."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment,
        stdout=log.open("ab"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def forked(words: list[str], log: Path) -> Program:
    """``python WORDS``, its imports done already."""
    return programs.start(*words, log=log)


Process = subprocess.Popen[bytes] | Program


def ranks_of(process: Process) -> list[int]:
    """The process ids of the ranks that torchrun started."""
    found = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False
    ).stdout.split()
    return [int(pid) for pid in found]


def lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def disturb(process: Process, action: str, run: Path, rng: random.Random) -> None:
    """Do it, and see that everything is gone."""
    while not (ranks := ranks_of(process)) and process.poll() is None:
        time.sleep(0.05)  # torchrun has not started them yet: there is nobody to ask
    if action == "ask to stop":
        for pid in ranks:
            os.kill(pid, rng.choice((signal.SIGTERM, signal.SIGUSR1)))
    elif action == "kill a rank" and ranks:
        os.kill(rng.choice(ranks), signal.SIGKILL)
    else:
        os.killpg(process.pid, signal.SIGKILL)
        for pid in ranks:  # torchrun puts its ranks into sessions of their own
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    process.wait(HANG)
    if action == "kill and damage":
        damage(run, rng)


def damage(run: Path, rng: random.Random) -> None:
    """Flip a byte of, cut or remove a random file of the newest checkpoint (never of the only one)."""
    found = sorted(p for p in (run / "checkpoints").glob("step_*") if not p.name.endswith(".part"))
    if len(found) < 2:
        return
    path = rng.choice(sorted(p for p in found[-1].iterdir() if p.is_file()))
    content = bytearray(path.read_bytes())
    how = rng.choice(("flip", "cut", "remove"))
    if how == "remove" or not content:
        path.unlink()
    elif how == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[rng.randrange(len(content))] ^= 1
        path.write_bytes(content)


def torture(
    folder: Path,
    kills: int,
    steps: int,
    seed: int,
    ranks: int = 2,
    start: Callable[[list[str], Path], Process] = start,
    more: tuple[str, ...] = (),
) -> Counter[str]:
    """How often what was done. ``more``: settings of the run. Raises AssertionError where the tortured
    run differs from the undisturbed one."""
    rng = random.Random(seed)
    whole = start(command(folder, "whole", steps, ranks, *more), folder / "whole.log")
    assert whole.wait(HANG) == 0, (folder / "whole.log").read_text()[-3000:]
    run, done = folder / "hurt", Counter[str]()
    arguments = command(folder, "hurt", steps, ranks, *more)
    behind = itertools.cycle(("true", "false"))
    while not (run / "summary.json").exists():
        process = start([*arguments, f"async_save={next(behind)}"], folder / "hurt.log")
        if sum(done.values()) < kills:
            # Some are hurt while they start, most after a few steps of their own.
            target = lines(run) + rng.randrange(0, max(2, steps // kills))
            while process.poll() is None and lines(run) < target:
                time.sleep(0.01)
            time.sleep(rng.random() * (8 if lines(run) == 0 and rng.random() < 0.3 else 0.05))
            if process.poll() is None and not (run / "summary.json").exists():
                action = rng.choice(ACTIONS)
                disturb(process, action, run, rng)
                done[action] += 1
                print(f"{sum(done.values())}/{kills}: {action} at line {lines(run)} of {steps}", flush=True)
        process.wait(HANG)
    compare(folder / "whole", run, steps)
    return done


def compare(whole: Path, hurt: Path, steps: int) -> None:
    one, other = (load_file(run / "model" / "model.safetensors") for run in (whole, hurt))
    assert all(torch.equal(one[name], other[name]) for name in one), "the final weights differ"
    records = [
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (whole, hurt)
    ]
    assert [r["step"] for r in records[1]] == list(range(steps)), (
        "a step is missing or twice in metrics.jsonl"
    )
    assert [r["loss"] for r in records[0]] == [r["loss"] for r in records[1]], "a loss differs"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    began = time.time()
    scratch = Path(tempfile.mkdtemp(prefix="torture-"))
    print(f"runs and logs are in {scratch}", flush=True)
    print(
        dict(torture(scratch, given.kills, given.steps, given.seed)),
        f"{time.time() - began:.0f} s: the same run",
    )
