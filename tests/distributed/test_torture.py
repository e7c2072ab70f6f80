"""A run goes on after anything, on two ranks or with another number of them than it was started with, and
ends where it would have."""

from __future__ import annotations

import random
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests import programs
from tests.distributed.torture import command, disturb, lines, torture
from tests.integration.online import lines as records
from tests.tiny import save_tiny_adder

RANKS, STOPS = (1, 4, 2), (4, 8)
"""It begins on one rank, is asked to stop after so many steps, and goes on with the next number of ranks."""
STEPS, LR = 18, 1e-4  # at ten times this rate rounding grows tenfold every few steps, resumed or not


def started(folder: Path, name: str, ranks: int) -> list[programs.Program]:
    settings = (f"lr={LR}", f"model.name_or_path={folder / 'model'}")
    return programs.ranks(ranks, *command(folder, name, STEPS, *settings), log=folder / f"{name}.log")


def test_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    save_tiny_adder(tmp_path / "model")
    programs.finished(started(tmp_path, "whole", 1))
    for ranks, at in zip(RANKS[:-1], STOPS, strict=True):
        processes = started(tmp_path, "other", ranks)
        while processes[0].poll() is None and lines(tmp_path / "other") < at:
            time.sleep(0.005)
        disturb(processes, "ask to stop", tmp_path / "other", random.Random(0))
        assert at <= lines(tmp_path / "other") < STEPS, processes[0].said()[-3000:]
    programs.finished(started(tmp_path, "other", RANKS[-1]))
    begin, one, other = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "model", tmp_path / "whole" / "model", tmp_path / "other" / "model")
    )
    assert max(float((one[key] - begin[key]).abs().max()) for key in one) > 1e-3
    assert max(float((one[key] - other[key]).abs().max()) for key in one) < 1e-5
    whole, found = (records(tmp_path / run) for run in ("whole", "other"))
    assert [r["step"] for r in found] == list(range(STEPS))
    ranks_of = [round(r["tokens_per_second"] / r["tokens_per_second_per_rank"]) for r in found]
    assert tuple(dict.fromkeys(ranks_of)) == RANKS
    for r, n in zip(found, ranks_of, strict=True):
        assert r["token_balance"] == 1.0 if n == 1 else 0 < r["token_balance"] <= 1
    assert [r["reference_step"] for r in whole] == [r["reference_step"] for r in found]
    torch.testing.assert_close([r["loss"] for r in found], [r["loss"] for r in whole], rtol=0, atol=1e-5)


def test_a_run_that_is_killed_and_damaged_ends_like_the_undisturbed_one(tmp_path):
    model = save_tiny_adder(tmp_path / "model")
    small = (f"model.name_or_path={model}",)
    done = torture(tmp_path, kills=3, steps=20, seed=3, more=small)
    assert sum(done.values()) >= 2
