"""{DPO, KTO, GRPO} x {offline, online, offline+humanline, online+humanline}: each trains, and its own log
proves what it was."""

from __future__ import annotations

import pytest
import yaml

from tests.integration.online import lines, rounds, run_online

VARIANTS = [(online, humanline) for humanline in (False, True) for online in (False, True)]
BOUNDS = ("log_epsilon_P=-0.02", "log_epsilon_R=0.02")
"""So narrow that a few steps at this learning rate reach them: an unclipped run would show by its zeros."""


def expected_reference(step: int, first_of_round: int, humanline: bool) -> int:
    """The step whose weights the reference has at ``step``: k = 2 syncs in steps 0, 2, 4 …, before their
    update, so that the next step sees it; a round starts with a reference of its own."""
    synced = [t for t in range(first_of_round, step) if t % 2 == 0] if humanline else []
    return max([first_of_round, *synced])


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cells")


@pytest.mark.parametrize("loss", ["dpo", "kto", "grpo"])
@pytest.mark.parametrize(("online", "humanline"), VARIANTS)
def test_a_cell_proves_itself(cache, loss, online, humanline):
    words = [f"loss={loss}", f"online={online}", f"humanline={humanline}", "sync_freq=2", "lr=1e-3", *BOUNDS]
    words += ["rounds.contexts=64", "rounds.contexts_per_round=32"] if online else ["n_examples=40"]
    run = run_online(cache, f"{loss}-{online}-{humanline}", *words)
    log = lines(run)
    assert len(log) >= 4
    # Where its examples come from
    assert (run / "rounds").exists() is online
    if online:
        assert sum(folder.record["steps"] for folder in rounds(run)) == len(log)
        assert [folder.record["contexts"] for folder in rounds(run)] == [[0, 32], [32, 64]]
        groups = [group for folder in rounds(run) for group in folder.groups()]
        assert all(c.token_ids for group in groups for c in group.completions)
        assert log[-1]["examples"] == len(groups) * (1 if loss == "dpo" else 2)
    else:
        assert all("round" not in line for line in log)
        assert log[-1]["examples"] == 40
    # Which weights its reference has
    begins: dict[int, int] = {}
    for line in log:
        begins.setdefault(line.get("round", 0), line["step"])
        first = begins[line.get("round", 0)]
        assert line["reference_step"] == expected_reference(line["step"], first, humanline), line
        if line["step"] == first:
            assert line["kl"] == 0.0
    assert len(begins) == (2 if online else 1)
    # Whether it clips
    clipped = sum(line["clipped_low"] + line["clipped_high"] for line in log)
    assert (clipped > 0) is humanline
    assert yaml.safe_load((run / "config.yaml").read_text())["loss"]["name"] == loss


def test_the_variants_of_a_loss_are_four_different_runs(cache):
    runs = [run for run in cache.iterdir() if (run / "metrics.jsonl").exists()]
    assert len({tuple(line["loss"] for line in lines(run)) for run in runs}) == len(runs)
