"""Rounds whose weights were kept, and what they left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.online import assert_same, cut_off, lines, rounds, run_online, scored_again

ROUNDS = ("online=true", "loss=dpo", "humanline=true", "lr=1e-3", "model.batch_size=4")
REPLAYED = (*ROUNDS, "rounds.replay=0.25")
KEPT = (*ROUNDS, "rounds.compress=true", "rounds.keep_weights=true")


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


def test_a_run_that_was_cut_off_keeps_the_same(kept, tmp_path):
    with cut_off(at=4):
        run_online(tmp_path, "r", *KEPT)
    run = run_online(tmp_path, "r", *KEPT, "resume=true")
    assert_same(run, kept)
    for path in kept.glob("rounds/*/weights/model.safetensors"):
        assert (run / path.relative_to(kept)).read_bytes() == path.read_bytes()
    for path in kept.glob("rounds/*/*.gz"):
        assert (run / path.relative_to(kept)).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("before", [False])
def test_a_run_goes_on_with_rounds_that_are_kept_otherwise(tmp_path, replayed, before):
    """Round 0 is found, trained on and replayed from as it is; those after it are written the other way."""

    def kept_so(on: bool) -> tuple[str, ...]:
        return (f"rounds.compress={str(on).lower()}", f"rounds.keep_weights={str(on).lower()}")

    with cut_off(at=2):
        run_online(tmp_path, "r", *REPLAYED, *kept_so(before))
    files = {path: path.read_bytes() for path in (tmp_path / "r" / "rounds" / "000").glob("*.jsonl*")}
    run = run_online(tmp_path, "r", *REPLAYED, *kept_so(not before), "resume=true")
    assert_same(run, replayed)
    assert len(files) == 3 and all(path.read_bytes() == content for path, content in files.items())
    ways = (before, not before, not before)
    for one, other, on in zip(rounds(run), rounds(replayed), ways, strict=True):
        for stage in ("samples", "scores", "groups"):
            assert one.file(stage).suffix == (".gz" if on else ".jsonl")
            assert one.read(stage) == other.read(stage)
        assert one.weights.is_dir() is on
    assert rounds(run)[1].record["replayed"] > 0
