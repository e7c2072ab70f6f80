"""rounds.lag=1: the next round is sampled from the weights that a round starts with while that round trains,
also after an interruption.

vLLM's place is taken by a second model, which is what an engine of its own is.
"""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch

import jobs.online
from common.errors import StoppedError
from jobs.online_source import OnlineSource
from models.export import full_state
from models.pretrained import load_policy
from models.ranks import Ranks
from rollouts.ledger import RoundFolder
from rollouts.rewards.base import RewardError
from rollouts.round_builder import RoundBuilder
from rollouts.samplers import EmbeddedSampler
from rollouts.vllm.engine import VllmEngine
from tests.integration.online import assert_same, cut_off, lines, rounds, run_online
from tests.tiny import make_config
from trainers.basic import BasicTrainer

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
    """An engine whose weights are a second model's; they reach it through a folder, as vLLM's do."""

    threads: set[str] = set()  # noqa: RUF012

    def __init__(self, policy, renderer, world):
        self.policy, self.ranks = policy, Ranks(world)
        self.other = load_policy(make_config().model, torch.device("cpu"))
        self.sampler = EmbeddedSampler(
            self.other, renderer, torch.device("cpu"), batch_size=256, synced=False
        )

    def publish(self, folder, version, keep):
        folder.mkdir(parents=True, exist_ok=True)  # as a run that was stopped leaves it
        torch.save(full_state(self.policy), folder / "weights.pt")
        self.reload_weights(folder, version)
        return {}

    def reload_weights(self, folder, version):
        self.other.model.load_state_dict(torch.load(folder / "weights.pt"))

    def sample(self, prompts, n, settings, seed, answered=None):
        self.threads.add(threading.current_thread().name)
        return self.sampler.sample(prompts, n, settings, seed)

    def sleep(self): ...

    def close(self): ...


@pytest.fixture(scope="module", autouse=True)
def second():
    def second(config, renderer, world, log_dir):
        return SimpleNamespace(
            engine=lambda policy, prompts: Second(policy, renderer, world), close=lambda: None
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs.online, "make_sampling", second)
        yield


@pytest.fixture(scope="module")
def whole(second, tmp_path_factory):
    """A run that nothing disturbs."""
    Second.threads.clear()
    return run_online(tmp_path_factory.mktemp("whole"), "whole", *LAGGING)


def test_a_round_is_sampled_from_where_the_one_before_started(whole):
    run = whole
    assert len(Second.threads) > 1, "nothing was sampled beside the training"
    records = [folder.record for folder in rounds(run)]
    begins = [min(line["step"] for line in lines(run) if line["round"] == i) for i in range(4)]
    assert [record["sampled_step"] for record in records] == [0, 0, begins[1], begins[2]]
    assert records[0]["weights"] == records[1]["weights"] != records[2]["weights"] != records[3]["weights"]
    for line in lines(run):
        assert line["staleness"] == line["step"] - records[line["round"]]["sampled_step"]
    assert all(0 <= share <= 1 for record in records for share in record["idle"].values())
    assert not list(run.glob("rounds/*/weights"))
    ids = [line["id"] for folder in rounds(run) for line in folder.read("samples")]
    assert len(ids) == 48 == len(set(ids))


def test_two_rounds_before(tmp_path):
    """Rounds 0 to 2 come from the initial weights, round i after them from those that round i - 2 began
    with."""
    run = run_online(tmp_path, "r", *LAGGING, "rounds.lag=2")
    records = [folder.record for folder in rounds(run)]
    begins = [min(line["step"] for line in lines(run) if line["round"] == i) for i in range(4)]
    assert [record["sampled_step"] for record in records] == [0, 0, 0, begins[1]]
    assert len({record["weights"] for record in records}) == 2
    assert [record["contexts"] for record in records] == [[12 * i, 12 * (i + 1)] for i in range(4)]
    assert not list(run.glob("rounds/*/weights"))


def test_a_round_ahead_that_cannot_be_made_ends_the_run_before_the_next_step(tmp_path):
    def refused(self, folder, first, *more, build=RoundBuilder.build):
        if first > 0:
            raise RewardError("the judge refuses every call")
        build(self, folder, first, *more)

    def slow(self, *of, step=BasicTrainer.step):
        time.sleep(0.5)
        return step(self, *of)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoundBuilder, "build", refused)
        patch.setattr(BasicTrainer, "step", slow)
        with pytest.raises(StoppedError, match=r"round 1: the judge refuses(.|\n)*resume=true"):
            run_online(tmp_path, "r", *LAGGING, "rounds.contexts=24", "model.batch_size=1")
    run = tmp_path / "r"
    assert len(lines(run)) <= 2 < rounds(run)[0].record["kept"], "it does not wait for its own round's end"
    run_online(tmp_path, "r", *LAGGING, "rounds.contexts=24", "model.batch_size=1", "resume=true")
    assert {line["round"] for line in lines(run)} == {0, 1}


@pytest.mark.parametrize(
    ("error", "raised", "said"),
    [
        (RewardError("the judge refuses every call"), StoppedError, r"round 1: the judge(.|\n)*resume=true"),
        (RuntimeError("a mistake"), RuntimeError, "a mistake"),
    ],
)
def test_a_round_ahead_that_fails_once_its_own_is_trained_loses_nothing(whole, tmp_path, error, raised, said):
    """Its own round is saved, however seldom checkpoints are, and the samples of the round ahead are kept."""
    waited_for = threading.Event()

    def refused(self, folder, *more, score=RoundBuilder._score):
        if folder.path.name == "001":
            waited_for.wait()
            raise error
        return score(self, folder, *more)

    def join(self, join=OnlineSource._join):
        waited_for.set()
        join(self)

    options = (*LAGGING, "save_every=1000")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoundBuilder, "_score", refused)
        patch.setattr(OnlineSource, "_join", join)
        with pytest.raises(raised, match=said):
            run_online(tmp_path, "r", *options)
    run = tmp_path / "r"
    trained = len(lines(run))
    assert (run / "checkpoints" / f"step_{trained:08d}").is_dir() and trained > 0
    assert rounds(run)[1].done("samples")
    assert_same(run_online(tmp_path, "r", *options, "resume=true"), whole)


def test_a_round_is_saved_before_the_wait_for_the_round_ahead(tmp_path):
    """A kill during the wait, which may take hours, loses nothing of the round before."""
    saved = []

    def join(self, join=OnlineSource._join):
        saved.append((tmp_path / "r" / "checkpoints" / f"step_{self.trainer.progress.step:08d}").is_dir())
        join(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OnlineSource, "_join", join)
        run_online(tmp_path, "r", *LAGGING, "rounds.contexts=24", "save_every=null")
    assert saved == [True, True]


def closed_when_sampled(self, close=jobs.online.Online.close):
    """The reward of a run that is cut off ends after the thread that scores with it, which lives on in this
    process, as it would not in a killed one."""
    for thread in threading.enumerate():
        if "(_run)" in thread.name:
            thread.join()
    close(self)


def test_interrupted_inside_a_round(whole, tmp_path):
    """The round ahead had not been sampled (its files are taken away): the weights that it was to come from
    are still there."""
    at = next(line["step"] for line in lines(whole) if line["round"] == 1) + 1
    with cut_off(at) as patch:
        # the weights stay, as where nothing was sampled yet
        patch.setattr(RoundBuilder, "_sampled", lambda self, folder: None)
        patch.setattr(jobs.online.Online, "close", closed_when_sampled)
        run_online(tmp_path, "r", *LAGGING)
    ahead = rounds(tmp_path / "r")[2]
    assert ahead.done("groups")
    for stage in ("samples", "scores", "groups"):
        ahead.file(stage).unlink(missing_ok=True)
    assert (ahead.path / "weights").exists()
    assert_same(run_online(tmp_path, "r", *LAGGING, "resume=true"), whole)


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
    assert {name for name in vars(Second) if not name.startswith("_") and name != "threads"} <= set(
        vars(VllmEngine)
    )
