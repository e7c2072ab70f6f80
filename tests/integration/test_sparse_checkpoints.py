"""save_every is obeyed online: a killed run goes on from an earlier round, and samples nothing again that is
there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.online import assert_same, cut_off, lines, rounds, run_online

RUN = (
    "online=true",
    "loss=dpo",
    "humanline=true",
    "rounds.contexts=60",
    "rounds.contexts_per_round=12",
    "model.batch_size=4",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Callable[[str], Path]:
    """A run with this ``rounds.lag`` that nothing disturbs, and whose checkpoints are those of its ends, the
    same one for all who ask."""
    folder = tmp_path_factory.mktemp("whole")

    @functools.cache
    def run(lag: str) -> Path:
        return run_online(folder, lag, *RUN, *ENDS, f"rounds.lag={lag}")

    return run


ENDS = ("save_every=1000", "keep_checkpoints=9")


def saved(run) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step_*"))


def test_rounds_between_two_checkpoints_are_trained_again_from_their_files(tmp_path, whole):
    """Sampled ahead; those of test_files_that_are_gone_are_made_again are not."""
    lag = "2"
    settings = (*ENDS, f"rounds.lag={lag}")
    whole = whole(lag)
    begins = [min(line["step"] for line in lines(whole) if line["round"] == i) for i in range(5)]
    assert saved(whole) == ["step_00000000", f"step_{lines(whole)[-1]['step'] + 1:08d}"]
    with cut_off(begins[3] + 1):
        run_online(tmp_path, "cut", *RUN, *settings)
    run = tmp_path / "cut"
    assert saved(run) == ["step_00000000"]
    made = {path: path.stat().st_mtime_ns for path in run.glob("rounds/*/samples.jsonl")}
    assert len(made) >= 4
    run_online(tmp_path, "cut", *RUN, *settings, "resume=true")
    assert {path: path.stat().st_mtime_ns for path in made} == made, "sampled again"
    assert_same(run, whole)
    assert [line["step"] for line in lines(run)] == list(range(len(lines(whole))))


def test_files_that_are_gone_or_come_from_other_weights_are_made_again(tmp_path, whole):
    whole = whole("0")
    begins = [min(line["step"] for line in lines(whole) if line["round"] == i) for i in range(5)]
    with cut_off(begins[2] + 1):
        run_online(tmp_path, "cut", *RUN, *ENDS)
    for stage in ("samples", "groups"):
        rounds(tmp_path / "cut")[1].file(stage).unlink()
    other = rounds(tmp_path / "cut")[2]
    stages, made = other.record["stages"], other.file("samples").stat().st_mtime_ns
    assert stages["samples"]["inputs"]["weights"] == other.record["weights"]
    stages["samples"]["inputs"]["weights"] = "others"
    other.note({"stages": stages})
    run = run_online(tmp_path, "cut", *RUN, *ENDS, "resume=true")
    assert_same(run, whole)
    assert other.file("samples").stat().st_mtime_ns > made
