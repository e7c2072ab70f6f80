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

STEPS, LR = 18, 1e-4  # at ten times this rate rounding grows tenfold every few steps, resumed or not


def started(folder, name: str, ranks: int) -> list[programs.Program]:
    settings = (f"lr={LR}", f"model.name_or_path={folder / 'model'}")
    return programs.ranks(ranks, *command(folder, name, STEPS, *settings), log=folder / f"{name}.log")


def stopped_and_resumed(folder, name: str, before: int, after: int) -> None:
    """Start on ``before`` ranks, ask to stop in mid-run, go on with ``after``."""
    processes = started(folder, name, before)
    while processes[0].poll() is None and lines(folder / name) < 7:
        time.sleep(0.005)
    disturb(processes, "ask to stop", folder / name, random.Random(0))
    assert 7 <= lines(folder / name) < STEPS, processes[0].said()[-3000:]
    programs.finished(started(folder, name, after))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    save_tiny_adder(folder / "model")
    programs.finished(started(folder, "whole", 1))
    return folder


@pytest.mark.parametrize(("before", "after"), [(1, 2), (4, 2)])
def test_another_number_of_ranks_goes_on(whole, before, after):
    name = f"{before}-{after}"
    stopped_and_resumed(whole, name, before, after)
    one, other = (load_file(whole / run / "model" / "model.safetensors") for run in ("whole", name))
    begin = load_file(whole / "model" / "model.safetensors")
    assert max(float((one[key] - begin[key]).abs().max()) for key in one) > 1e-3
    assert max(float((one[key] - other[key]).abs().max()) for key in one) < 1e-5
    records = [
        [json.loads(line) for line in (whole / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("whole", name)
    ]
    assert [r["step"] for r in records[1]] == list(range(STEPS))
    ranks = [round(r["tokens_per_second"] / r["tokens_per_second_per_rank"]) for r in records[1]]
    assert ranks == sorted(ranks, reverse=before > after) and {ranks[0], ranks[-1]} == {before, after}
    assert all(
        r["token_balance"] == 1.0 if n == 1 else 0 < r["token_balance"] <= 1
        for r, n in zip(records[1], ranks, strict=True)
    )
    assert [r["reference_step"] for r in records[0]] == [r["reference_step"] for r in records[1]]
    torch.testing.assert_close(
        [r["loss"] for r in records[1]], [r["loss"] for r in records[0]], rtol=0, atol=1e-5
    )
