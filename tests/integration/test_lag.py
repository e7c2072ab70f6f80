"""rounds.lag=1: the next round is sampled from the weights that a round starts with before that round trains,
also after an interruption.

vLLM's place is taken by a second model, which is what an engine of its own is.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import jobs.online
from common.errors import StoppedError
from jobs.online_source import OnlineSource
from models.distributed import Ranks
from models.export import full_state
from models.pretrained import load_policy
from rollouts.embedded import EmbeddedSampler
from rollouts.ledger import RoundFolder
from rollouts.rewards.base import RewardError
from rollouts.round_builder import RoundBuilder
from rollouts.vllm.sampler import VllmSampler
from tests.integration.online import assert_same, lines, rounds, run_online
from tests.tiny import make_config

LAGGING = (
    "online=true",
    "loss=dpo",
    "sampler=vllm",
    "rounds.lag=1",
    "rounds.contexts=48",
    "rounds.contexts_per_round=12",
    "model.batch_size=4",
    "save_every=4",
)


class Second:
    """A sampler whose weights are a second model's; they reach it through a folder, as vLLM's do."""

    def __init__(self, config, renderer, world, log_dir):
        self.ranks = Ranks()
        self.other = load_policy(make_config().model, torch.device("cpu"))
        self.sampler = EmbeddedSampler(self.other, renderer, replace(world, size=1), batch_size=256)

    def attach(self, policy, prompts):
        self.policy = policy

    def publish(self, folder, version, keep):
        folder.mkdir(parents=True, exist_ok=True)  # as a run that was stopped leaves it
        torch.save(full_state(self.policy), folder / "weights.pt")
        self.other.model.load_state_dict(torch.load(folder / "weights.pt"))
        return {}

    def sample(self, prompts, n, settings, seed, answered=None):
        return self.sampler.share(prompts, n, settings, seed)

    def layout(self):
        return {}

    dealt = layout

    def sleep(self): ...

    def close(self): ...


@pytest.fixture(scope="module", autouse=True)
def second():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs.online, "make_sampler", Second)
        yield


@pytest.fixture(scope="module")
def whole(second, tmp_path_factory):
    """A run that nothing disturbs."""
    return run_online(tmp_path_factory.mktemp("whole"), "whole", *LAGGING)


def test_a_round_is_sampled_from_where_the_one_before_started(whole):
    run = whole
    records = [folder.record for folder in rounds(run)]
    begins = [min(line["step"] for line in lines(run) if line["round"] == i) for i in range(4)]
    assert [record["sampled_step"] for record in records] == [0, 0, begins[1], begins[2]]
    assert records[0]["weights"] == records[1]["weights"] != records[2]["weights"] != records[3]["weights"]
    for line in lines(run):
        assert line["staleness"] == line["step"] - records[line["round"]]["sampled_step"]
    assert not list(run.glob("rounds/*/weights"))
    ids = [line["id"] for folder in rounds(run) for line in folder.read("samples")]
    assert len(ids) == 48 == len(set(ids))


@pytest.mark.parametrize(
    ("error", "raised", "said"),
    [
        (RewardError("the judge refuses every call"), StoppedError, r"round 2: the judge(.|\n)*resume=true"),
        (RuntimeError("a mistake"), RuntimeError, "a mistake"),
    ],
)
def test_a_round_ahead_that_cannot_be_made_loses_nothing(whole, tmp_path, error, raised, said):
    """The round before is saved, however seldom checkpoints are, and the samples of the round ahead are
    kept."""

    def refused(self, folder, *more, score=RoundBuilder._score):
        if folder.path.name == "002":
            raise error
        return score(self, folder, *more)

    options = (*LAGGING, "save_every=1000")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoundBuilder, "_score", refused)
        with pytest.raises(raised, match=said):
            run_online(tmp_path, "r", *options)
    run = tmp_path / "r"
    trained = len(lines(run))
    assert (run / "checkpoints" / f"step_{trained:08d}").is_dir() and trained > 0
    assert {line["round"] for line in lines(run)} == {0}
    assert rounds(run)[2].done("samples")
    assert_same(run_online(tmp_path, "r", *options, "resume=true"), whole)


def test_a_round_is_saved_before_the_round_ahead_is_sampled(tmp_path):
    """A kill while it is sampled, which may take hours, loses nothing of the round before."""
    saved = []

    def make(self, index, make=OnlineSource._make):
        step = self.trainer.progress.step
        saved.append((index, (tmp_path / "r" / "checkpoints" / f"step_{step:08d}").is_dir()))
        make(self, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OnlineSource, "_make", make)
        run_online(tmp_path, "r", *LAGGING, "rounds.contexts=36", "save_every=null")
    assert saved == [(0, True), (1, True), (2, True)]


def test_killed_before_the_groups_of_a_round_ahead_are_written(tmp_path, monkeypatch):
    """Whether more must be sampled for a round is known from its groups alone: until then its weights
    stay."""
    filling = (*LAGGING, "rounds.fill=true")
    whole = run_online(tmp_path, "whole", *filling)
    write = RoundFolder.write

    def killed(self, stage, *others):
        if stage == "groups" and self.path.name == "002":
            raise KeyboardInterrupt
        write(self, stage, *others)

    with monkeypatch.context() as patch:
        patch.setattr(RoundFolder, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            run_online(tmp_path, "r", *filling)
    ahead = rounds(tmp_path / "r")[2]
    assert ahead.done("scores") and not ahead.done("groups")
    assert_same(run_online(tmp_path, "r", *filling, "resume=true"), whole)
    assert not list((tmp_path / "r").glob("rounds/*/weights"))


def test_the_real_engine_has_what_rounds_ask_of_it():
    assert {name for name in vars(Second) if not name.startswith("_")} <= set(vars(VllmSampler))
