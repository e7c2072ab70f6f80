"""rounds.lag=1: the next round is sampled from the weights that a round starts with before that round trains,
also after an interruption. More of it: test_kills.py."""

from __future__ import annotations

import pytest

from common.errors import StoppedError
from jobs.online import OnlineSource
from rollouts.ledger import RoundFolder
from rollouts.rewards.base import RewardError
from rollouts.round_builder import RoundBuilder
from tests.integration.online import assert_same, lines, rounds, run_online

LAGGING = ("online=true", "loss=dpo", "rounds.lag=1", "rounds.fill=true", "rounds.contexts=48")
LAGGING += ("rounds.contexts_per_round=12", "model.batch_size=4")
SELDOM = (*LAGGING, "save_every=1000")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing disturbs. Before a round ahead is sampled, which may take hours, the round before is
    saved."""
    folder, saved = tmp_path_factory.mktemp("whole"), []

    def make(self, index, make=OnlineSource._make):
        step = self.trainer.progress.step
        saved.append((index, (folder / "whole" / "checkpoints" / f"step_{step:08d}").is_dir()))
        make(self, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OnlineSource, "_make", make)
        run = run_online(folder, "whole", *LAGGING, "save_every=null")
    assert len(saved) > 2 and saved == [(index, True) for index in range(len(saved))]
    return run


def test_a_round_ahead_that_cannot_be_made_loses_nothing(whole, tmp_path):
    """The round before is saved, however seldom checkpoints are; the samples of the round ahead are kept."""

    def refused(self, folder, *more, score=RoundBuilder._score):
        if folder.path.name == "002":
            raise RewardError("the judge refuses every call")
        return score(self, folder, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoundBuilder, "_score", refused)
        with pytest.raises(StoppedError, match=r"round 2: the judge(.|\n)*resume=true"):
            run_online(tmp_path, "r", *SELDOM)
    run = tmp_path / "r"
    trained = len(lines(run))
    assert (run / "checkpoints" / f"step_{trained:08d}").is_dir() and trained > 0
    assert {line["round"] for line in lines(run)} == {0}
    assert rounds(run)[2].done("samples")
    assert_same(run_online(tmp_path, "r", *SELDOM, "resume=true"), whole)


def test_killed_before_the_groups_of_a_round_ahead_are_written(whole, tmp_path):
    """Whether more must be sampled for a round is known from its groups alone."""
    write = RoundFolder.write

    def killed(self, stage, *others):
        if stage == "groups" and self.path.name == "002":
            raise KeyboardInterrupt
        write(self, stage, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoundFolder, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            run_online(tmp_path, "r", *SELDOM)
    ahead = rounds(tmp_path / "r")[2]
    assert ahead.done("scores") and not ahead.done("groups")
    assert_same(run_online(tmp_path, "r", *SELDOM, "resume=true"), whole)
