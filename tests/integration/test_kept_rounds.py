"""Rounds whose weights were kept, what they left, and what another run's left in their places."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError, DataError
from tests.integration.online import assert_same, cut_off, lines, rounds, run_online, scored_again

ROUNDS = ("online=true", "loss=dpo", "humanline=true", "lr=1e-3", "model.batch_size=4")
REPLAYED = (*ROUNDS, "rounds.replay=0.25")
KEPT = (*ROUNDS, "rounds.compress=true", "rounds.keep_weights=true", "save_every=4", "keep_checkpoints=3")
OF_ANOTHER = r"^resume=True: \S+/step_0000000{0} is of step {1} of run \w+, and \S+/run.json is of run \w+:"
NOT_THE_ROUND = r"rounds/00{0}/round\.json is not as it was written \(it is of round {1} of run \w+\)"
ALL_BUT_SETTINGS = "checkpoints rounds run.json metrics.jsonl"
MERGED = {
    "checkpoints/step_00000005": OF_ANOTHER.format(5, 5),
    "checkpoints/step_00000003": OF_ANOTHER.format(3, 3),
    "checkpoints": OF_ANOTHER.format(5, 5),
    "run.json": OF_ANOTHER.format(5, 5),
    ALL_BUT_SETTINGS: r"^seed=1: .* of a run with another seed; .*'resume_with_other=\[seed\]'",
    "rounds": NOT_THE_ROUND.format(0, 0),
    "rounds/001": NOT_THE_ROUND.format(1, 1),
    "rounds/000/round.json": NOT_THE_ROUND.format(0, 0),
    "rounds/000/groups.jsonl.gz": r"rounds/000/groups\.jsonl\.gz is not as it was written",
    "rounds/000/samples.jsonl.gz": r"rounds/000/samples\.jsonl\.gz is not as it was written",
    "rounds/001/groups.jsonl.gz": r"rounds/001/groups\.jsonl\.gz is not as it was written",
    "rounds/001/scores.jsonl.gz": r"rounds/001/scores\.jsonl\.gz is not as it was written",
}
"""What is put in from another run -> the refusal."""
SWAPPED = {
    ("rounds/000", "rounds/001"): NOT_THE_ROUND.format(0, 1),
    ("checkpoints/step_00000003", "checkpoints/step_00000004"): OF_ANOTHER.format(4, 3),
    ("rounds", "aside"): r"rounds/000/round\.json is not as it was written \(it is gone",
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    return run_online(tmp_path_factory.mktemp("kept"), "r", *KEPT)


@pytest.fixture(scope="module")
def replayed(tmp_path_factory) -> Path:
    return run_online(tmp_path_factory.mktemp("replayed"), "r", *REPLAYED)


def test_the_kept_weights_say_of_the_samples_what_the_sampler_did(kept):
    for found, folder in zip(scored_again(kept), rounds(kept), strict=True):
        own = sum(len(c["token_ids"]) for line in folder.read("samples") for c in line["completions"])
        assert len(found) == own and found.max() < 1e-4


def test_how_a_round_is_kept_changes_nothing_of_the_run(kept, tmp_path):
    plain = run_online(tmp_path, "r", *ROUNDS)
    assert_same(plain, kept)
    for one, other in zip(rounds(plain), rounds(kept), strict=True):
        for stage in ("samples", "scores", "groups"):
            assert one.file(stage).name == f"{stage}.jsonl" and other.file(stage).name == f"{stage}.jsonl.gz"
            assert one.read(stage) == other.read(stage)
        assert not one.weights.exists()
    assert all("weights" not in line for line in lines(plain))


def test_a_run_that_was_cut_off_refuses_what_is_anothers_and_keeps_the_same(kept, tmp_path):
    run, other, before = tmp_path / "r", tmp_path / "other", tmp_path / "before"
    for folder, seed in ((run, 1), (other, 2)):
        with cut_off(at=5):
            run_online(tmp_path, folder.name, *KEPT, f"seed={seed}")
    shutil.copytree(run, before)

    def refused(message: str) -> None:
        batches: list[Any] = []
        with pytest.raises((ConfigError, DataError), match=message), cut_off(None, batches):
            run_online(tmp_path, "r", *KEPT, "resume=true")
        assert not batches, "it is refused before it trains"
        shutil.rmtree(run)
        shutil.copytree(before, run)

    for names, message in MERGED.items():
        for path in (run / name for name in names.split()):
            theirs = other / path.relative_to(run)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            shutil.copytree(theirs, path) if theirs.is_dir() else shutil.copy(theirs, path)
        refused(message)
    for (first, second), message in SWAPPED.items():
        (run / first).rename(run / "between")
        if (run / second).exists():
            (run / second).rename(run / first)
        (run / "between").rename(run / second)
        refused(message)
    rounds(run)[0].note({"sampled_step": 1})  # with a checksum that fits
    refused(r"rounds/000/round\.json is not as it was written \(it is gone, or not the checkpoint's")
    (run / "run.json").write_text("{")  # its checkpoints say which run it is
    run_online(tmp_path, "r", *KEPT, "resume=true")
    assert (begun := json.loads((before / "run.json").read_text())["run"])
    assert json.loads((run / "run.json").read_text())["run"] == begun
    assert_same(run, kept)
    for path in kept.glob("rounds/*/weights/model.safetensors"):
        assert (run / path.relative_to(kept)).read_bytes() == path.read_bytes()
    for path in kept.glob("rounds/*/*.gz"):
        assert (run / path.relative_to(kept)).read_bytes() == path.read_bytes()


def test_a_run_goes_on_with_rounds_that_are_kept_otherwise(tmp_path, replayed):
    """Round 0 is found, trained on and replayed from as it is; those after it are written the other way."""

    def kept_so(on: bool) -> tuple[str, ...]:
        return (f"rounds.compress={str(on).lower()}", f"rounds.keep_weights={str(on).lower()}")

    with cut_off(at=2):
        run_online(tmp_path, "r", *REPLAYED, *kept_so(False))
    files = {path: path.read_bytes() for path in (tmp_path / "r" / "rounds" / "000").glob("*.jsonl*")}
    run = run_online(tmp_path, "r", *REPLAYED, *kept_so(True), "resume=true")
    assert_same(run, replayed)
    assert len(files) == 3 and all(path.read_bytes() == content for path, content in files.items())
    ways = (False, True, True)
    for one, other, on in zip(rounds(run), rounds(replayed), ways, strict=True):
        for stage in ("samples", "scores", "groups"):
            assert one.file(stage).suffix == (".gz" if on else ".jsonl")
            assert one.read(stage) == other.read(stage)
        assert one.weights.is_dir() is on
    assert rounds(run)[1].record["replayed"] > 0
