"""How fresh the samples of a round are: ``rounds.lag`` with a sampler that is the policy, ``rounds.passes``,
``rounds.replay``. Runs that are interrupted end like those that are not."""

from __future__ import annotations

from collections import Counter
from statistics import fmean

import pytest

from tests.integration.online import assert_same, cut_off, lines, rounds, run_online

DPO = (
    "online=true",
    "loss=dpo",
    "humanline=true",
    "rounds.contexts=48",
    "rounds.contexts_per_round=12",
    "model.batch_size=4",
    "save_every=8",
)


def trained(folder, name, *overrides, until=None):
    """(run, the examples of every step): a run that ends, or is cut off before step ``until``."""
    batches = []
    with cut_off(until, batches):
        run_online(folder, name, *DPO, *overrides)
    return folder / name, batches


def keys(batches):
    return [[row.key for example in batch for row in example.rows] for batch in batches]


def test_the_policy_samples_ahead_of_itself(tmp_path):
    """Round i comes from the weights that round i - 2 began with; cut off inside round 1, the run goes on to
    the same end."""
    run, _ = trained(tmp_path, "whole", "rounds.lag=2")
    records = [folder.record for folder in rounds(run)]
    begins = [min(line["step"] for line in lines(run) if line["round"] == i) for i in range(4)]
    assert [record["sampled_step"] for record in records] == [0, 0, 0, begins[1]]
    assert len({record["weights"] for record in records}) == 2
    for line in lines(run):
        assert line["staleness"] == line["step"] - records[line["round"]]["sampled_step"]
    assert lines(run)[-1]["staleness"] > lines(run)[0]["staleness"] == 0
    assert all(0 <= share <= 1 for record in records for share in record["idle"].values())
    trained(tmp_path, "cut", "rounds.lag=2", until=begins[1] + 1)
    assert_same(run_online(tmp_path, "cut", *DPO, "rounds.lag=2", "resume=true"), run)


def test_passes_train_on_every_example_as_often(tmp_path):
    run, batches = trained(tmp_path, "passes", "rounds.passes=3")
    for index, folder in enumerate(rounds(run)):
        here = [
            key
            for line, each in zip(lines(run), keys(batches), strict=True)
            for key in each
            if line["round"] == index
        ]
        assert set(Counter(here).values()) == {3}
        assert len(here) == 3 * 2 * folder.record["examples"] > 0
    assert lines(run)[-1]["examples"] == 3 * sum(folder.record["examples"] for folder in rounds(run))


def test_replayed_contexts_are_of_earlier_rounds(tmp_path):
    settings = ("rounds.replay=0.4", "rounds.feedback=random", "rounds.contexts=33")
    run, batches = trained(tmp_path, "whole", *settings)
    records, per_round = [folder.record for folder in rounds(run)], Counter()
    assert [r["contexts"] for r in records] == [
        [0, 12],
        *([12 + 7 * i, 19 + 7 * i] for i in range(3)),
    ]
    own = [{group.prompt.id for group in folder.groups()} for folder in rounds(run)]
    for line, batch in zip(lines(run), batches, strict=True):
        index = line["round"]
        assert line["staleness"] == pytest.approx(line["step"] - fmean(e.sampled_step for e in batch))
        for example in batch:
            of = next(i for i, record in enumerate(records) if record["sampled_step"] == example.sampled_step)
            assert of <= index and example.prompt_id in own[of]
            per_round[index, of == index] += 1
    assert per_round[0, False] == 0
    for index, record in enumerate(records[1:], 1):
        assert per_round[index, False] == record["replayed"] == min(5, sum(map(len, own[:index])))
        assert per_round[index, True] == len(own[index])
    trained(tmp_path, "cut", *settings, until=lines(run)[-1]["step"] - 1)
    assert_same(run_online(tmp_path, "cut", *DPO, *settings, "resume=true"), run)


def test_a_reference_that_outlives_rounds_is_gone_on_with(tmp_path):
    """Without syncing it stays at the initial weights: ``reference_step`` is 0 throughout. A run that is cut
    off in a later round, or at the start of one, ends like the whole."""
    settings = ("rounds.reset_reference=false", "sync_mode=never", "rounds.contexts=36")
    run, _ = trained(tmp_path, "whole", *settings)
    assert {line["reference_step"] for line in lines(run)} == {0}
    begins = [min(line["step"] for line in lines(run) if line["round"] == i) for i in range(3)]
    for name, until in (("inside", begins[2] + 1), ("between", begins[2])):
        trained(tmp_path, name, *settings, until=until)
        assert_same(run_online(tmp_path, name, *DPO, *settings, "resume=true"), run)
