"""Rounds that a reward model scores, on two ranks: killed while scoring they go on to the same result, and
sampling ahead changes no score."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import jobs.online
from models.export import full_state
from rollouts.rewards.models import ModelReward
from tests import programs
from tests.distributed.joining import join
from tests.integration.online import SHORT, lines, rounds, scored_again
from tests.integration.test_lag import LAGGING, Second
from tests.programs import in_ranks
from tests.tiny import make_config
from tests.tiny_armorm import save_armorm
from train import train


class Beside(Second):
    """The engine on rank 0, of a policy that is on all of them."""

    def publish(self, folder, version, keep):
        state = full_state(self.policy)

        def write() -> None:
            folder.mkdir(parents=True)
            torch.save(state, folder / "weights.pt")
            self.other.model.load_state_dict(state)

        self.ranks.on_main(write)
        return {}


def lagging(rank: int, ranks: int, store: str, folder: str, armorm: str) -> None:
    """``scored-RANK.json`` says how many batches this rank scored."""
    scored: list[int] = []
    of_batch = ModelReward._of_batch

    def noted(self, rows):
        scored.append(len(rows))
        return of_batch(self, rows)

    join(rank, ranks, store)
    limits = ("max_length=400", "max_prompt_length=200", "dtype=float32", "batch_tokens=600")
    words = [f"reward.armorm.{word}" for word in (f"name_or_path={armorm}", *limits)]
    places = (f"runs_dir={folder}", f"cache_dir={folder}/cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs.online, "make_sampler", Beside)
        patch.setattr(ModelReward, "_of_batch", noted)
        train(make_config(*SHORT, *places, *LAGGING, "rounds.contexts=24", "reward=armorm", *words), "r")
    (Path(folder) / f"scored-{rank}.json").write_text(json.dumps(len(scored)))


LIMITS = "max_length:400,max_prompt_length:200,dtype:float32,batch_tokens:600"


@pytest.fixture(scope="module")
def armorm(tmp_path_factory):
    return save_armorm(tmp_path_factory.mktemp("reward") / "armorm")


def start(folder, armorm, slow=0):
    model = f"model:{{reward:armorm,weight:1,name_or_path:{armorm},{LIMITS}}}"
    function = "slow:{reward:function,weight:1,path:tests.integration.rewarding.slow,conversational:false}"
    words = (
        "train.py",
        *SHORT,
        "online=true",
        "loss=kto",
        "resume=true",
        "reward=weighted",
        f"reward.weighted.parts={{{model},{function}}}",
        "rounds.keep_weights=true",
        "rounds.contexts=24",
        "rounds.contexts_per_round=12",
        f"runs_dir={folder}",
        f"cache_dir={folder}/cache",
        "exp_name=r",
    )
    return programs.ranks(2, *words, env={"SLOW_REWARD": str(slow)})


@pytest.mark.slow
def test_killed_while_scoring(tmp_path, armorm):
    programs.finished(start(tmp_path / "whole", armorm))
    first = tmp_path / "killed" / "r" / "rounds" / "000"
    killed = start(tmp_path / "killed", armorm, slow=60)
    while not (first / "samples.jsonl").exists():
        assert killed[0].poll() is None, killed[0].said()[-3000:]
        time.sleep(0.01)
    for rank in killed:
        rank.kill()
        assert rank.wait() != 0
    sampled = (first / "samples.jsonl").stat().st_mtime_ns
    assert not (first / "scores.jsonl").exists()
    programs.finished(start(tmp_path / "killed", armorm))
    assert (first / "samples.jsonl").stat().st_mtime_ns == sampled, "what was on disk was sampled again"
    runs = [tmp_path / name / "r" for name in ("whole", "killed")]
    for a, b in zip(*map(rounds, runs), strict=True):
        assert a.file("scores").read_bytes() == b.file("scores").read_bytes()
        means = a.record["metrics"]
        assert means["reward"] == pytest.approx(means["reward_model"] + means["reward_slow"])
    one, other = (load_file(run / "model" / "model.safetensors") for run in runs)
    assert all((one[name] == other[name]).all() for name in one)
    assert any("round_reward_model" in line for line in lines(runs[0]))
    assert all(len(found) > 100 and found.max() < 1e-4 for found in scored_again(runs[1]))


def test_what_is_sampled_ahead_all_ranks_score(tmp_path, armorm):
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        in_ranks(lagging, (ranks, str(tmp_path / f"store-{ranks}"), str(folder), armorm), ranks)
    (alone,) = batches(tmp_path / "1")
    shares = batches(tmp_path / "2")
    assert all(shares) and sum(shares) == alone
    one, two = (rounds(tmp_path / str(ranks) / "r") for ranks in (1, 2))
    assert [a.record["sampled_step"] for a in one] == [b.record["sampled_step"] for b in two]
    for a, b in list(zip(one, two, strict=True))[:2]:  # both from the initial weights
        assert a.file("scores").read_bytes() == b.file("scores").read_bytes()


def batches(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("scored-*.json"))]
