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


@pytest.mark.parametrize(("how", "end"), [("refused", StoppedError), ("killed", KeyboardInterrupt)])
def test_a_round_ahead_that_is_not_made_loses_nothing(whole, tmp_path, how, end):
    """The round before is saved, however seldom checkpoints are; the samples of the round ahead are kept.
    Whether more must be sampled for a round is known from its groups alone."""
    score, write = RoundBuilder._score, RoundFolder.write

    def refused(self, folder, *more):
        if folder.path.name == "002" and how == "refused":
            raise RewardError("the judge refuses every call")
        return score(self, folder, *more)

    def killed(self, stage, *others):
        if (self.path.name, stage, how) == ("002", "groups", "killed"):
            raise KeyboardInterrupt
        write(self, stage, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoundBuilder, "_score", refused)
        patch.setattr(RoundFolder, "write", killed)
        said = r"round 2: the judge(.|\n)*resume=true" if how == "refused" else None
        with pytest.raises(end, match=said):
            run_online(tmp_path, "r", *SELDOM)
    run = tmp_path / "r"
    trained = len(lines(run))
    assert (run / "checkpoints" / f"step_{trained:08d}").is_dir() is (how == "refused") and trained > 0
    assert {line["round"] for line in lines(run)} == {0}
    ahead = rounds(run)[2]
    assert ahead.done("samples") and not ahead.done("groups") and ahead.done("scores") is (how == "killed")
    assert_same(run_online(tmp_path, "r", *SELDOM, "resume=true"), whole)
