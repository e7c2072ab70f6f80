"""Torture: one run on two ranks, killed, asked to stop and damaged at random moments, must end like the
undisturbed one.

    python -m tests.distributed.torture --kills 50      # make torture

It writes its checkpoints now while training waits, now behind it (``async_save``). Every step appears exactly
once in metrics.jsonl, and the final weights are equal to the bit.
"""

from __future__ import annotations

import argparse
import itertools
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests import programs
from tests.integration.online import assert_same
from tests.integration.online import lines as records
from tests.programs import Program
from tests.tiny_files import cut, flipped

WORDS = """
loss=kto humanline=true sync_freq=3 resume=true lr=1e-3 model.batch_size=4 save_every=8 keep_checkpoints=3
eval_every=32 n_eval_examples=8 data.verifier=null retention.kl=false diagnostics=false report=false
wandb.enabled=false
"""
ACTIONS = ("kill everything", "kill a rank", "ask to stop", "kill and damage")


def command(folder: Path, name: str, steps: int, *more: str) -> list[str]:
    places = (f"exp_name={name}", f"runs_dir={folder}", f"cache_dir={folder / 'cache'}")
    return ["train.py", *WORDS.split(), *places, f"n_examples={4 * steps}", *more]


def lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def disturb(processes: list[Program], action: str, run: Path, rng: random.Random) -> None:
    """Do it, and wait until all are gone. The ranks beside a killed one get the signal of a launcher."""
    if action == "kill a rank":
        rng.choice(processes).kill()
    for process in processes:
        asked = rng.choice((signal.SIGTERM, signal.SIGUSR1)) if action == "ask to stop" else signal.SIGTERM
        process.send_signal(asked if action in ("ask to stop", "kill a rank") else signal.SIGKILL)
    for process in processes:
        process.wait()
    if action == "kill and damage":
        damage(run, rng)


def damage(run: Path, rng: random.Random) -> None:
    """Flip a byte of, cut or remove a random file of the newest checkpoint (never of the only one)."""
    found = sorted(p for p in (run / "checkpoints").glob("step_*") if not p.name.endswith(".part"))
    if len(found) < 2:
        return
    path = rng.choice(sorted(p for p in found[-1].iterdir() if p.is_file()))
    how = rng.choice((flipped, cut, Path.unlink))
    (how if path.stat().st_size else Path.unlink)(path)


def torture(folder: Path, kills: int, steps: int, seed: int, more: tuple[str, ...] = ()) -> Counter[str]:
    """How often what was done. ``more``: settings of the run. Raises AssertionError where the tortured
    run differs from the undisturbed one."""
    rng = random.Random(seed)
    programs.finished(programs.ranks(2, *command(folder, "whole", steps, *more)))
    run, done = folder / "hurt", Counter[str]()
    behind = itertools.cycle(("true", "false"))
    while not (run / "summary.json").exists():
        words = [*command(folder, "hurt", steps, *more), f"async_save={next(behind)}"]
        processes, before = programs.ranks(2, *words, log=folder / "hurt.log"), done.copy()
        if sum(done.values()) < kills:
            # Some are hurt while they start, most after a few steps of their own.
            target = lines(run) + rng.randrange(0, max(2, steps // kills))
            while processes[0].poll() is None and lines(run) < target:
                time.sleep(0.01)
            time.sleep(rng.random() * (8 if lines(run) == 0 and rng.random() < 0.3 else 0.05))
            if processes[0].poll() is None and not (run / "summary.json").exists():
                action = rng.choice(ACTIONS)
                disturb(processes, action, run, rng)
                done[action] += 1
                print(f"{sum(done.values())}/{kills}: {action} at line {lines(run)} of {steps}", flush=True)
        codes = [process.wait() for process in processes]
        assert before != done or not any(codes), (folder / "hurt.log").read_text()[-3000:]
    assert_same(run, folder / "whole")
    assert [line["step"] for line in records(run)] == list(range(steps)), "a step is missing or twice"
    return done


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="torture-"))
    print(f"runs and logs are in {scratch}", flush=True)
    print(dict(torture(scratch, given.kills, given.steps, given.seed)), "the same run")
