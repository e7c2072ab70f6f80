"""A run goes on with another number of ranks than it was started with, and ends where it would have."""

from __future__ import annotations

import json
import random
import time

import pytest
import torch
from safetensors.torch import load_file

from tests import programs
from tests.distributed.torture import command, disturb, lines
from tests.tiny import save_tiny_adder

RANKS, STOPS = (1, 4, 2), (4, 8)
"""It begins on one rank, is asked to stop after so many steps, and goes on with the next number of ranks."""
STEPS, LR = 18, 1e-4  # at ten times this rate rounding grows tenfold every few steps, resumed or not


def started(folder, name: str, ranks: int) -> list[programs.Program]:
    settings = (f"lr={LR}", f"model.name_or_path={folder / 'model'}")
    return programs.ranks(ranks, *command(folder, name, STEPS, *settings), log=folder / f"{name}.log")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a run of one rank, and one that is asked to stop twice and goes on with other numbers of ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    save_tiny_adder(folder / "model")
    programs.finished(started(folder, "whole", 1))
    for ranks, at in zip(RANKS[:-1], STOPS, strict=True):
        processes = started(folder, "other", ranks)
        while processes[0].poll() is None and lines(folder / "other") < at:
            time.sleep(0.005)
        disturb(processes, "ask to stop", folder / "other", random.Random(0))
        assert at <= lines(folder / "other") < STEPS, processes[0].said()[-3000:]
    programs.finished(started(folder, "other", RANKS[-1]))
    return folder


def test_another_number_of_ranks_goes_on(folder):
    one, other = (load_file(folder / run / "model" / "model.safetensors") for run in ("whole", "other"))
    begin = load_file(folder / "model" / "model.safetensors")
    assert max(float((one[key] - begin[key]).abs().max()) for key in one) > 1e-3
    assert max(float((one[key] - other[key]).abs().max()) for key in one) < 1e-5
    records = [
        [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("whole", "other")
    ]
    assert [r["step"] for r in records[1]] == list(range(STEPS))
    ranks = [round(r["tokens_per_second"] / r["tokens_per_second_per_rank"]) for r in records[1]]
    assert tuple(dict.fromkeys(ranks)) == RANKS
    assert all(
        r["token_balance"] == 1.0 if n == 1 else 0 < r["token_balance"] <= 1
        for r, n in zip(records[1], ranks, strict=True)
    )
    assert [r["reference_step"] for r in records[0]] == [r["reference_step"] for r in records[1]]
    torch.testing.assert_close(
        [r["loss"] for r in records[1]], [r["loss"] for r in records[0]], rtol=0, atol=1e-5
    )
