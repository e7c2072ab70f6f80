"""Reward models on several ranks: the scores of one to the bit, and one end for all where one fails."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common.errors import UserError
from config.cli import guarded
from config.schema_rewards import RewardConfig
from data.types import Prompt, Turn
from jobs.evaluation import Evaluator
from jobs.signals import Signals
from models.distributed import Ranks, World, others_end
from rollouts.embedded import EmbeddedSampler
from rollouts.rewards.base import Reward, make_reward
from rollouts.rewards.settings import WeightedConfig
from tests import programs
from tests.distributed.joining import in_world, world_of
from tests.distributed.torture import command
from tests.tiny import reward_of, save_tiny_adder
from tests.tiny_armorm import save_armorm
from train import compose, run
from trainers.basic import BasicTrainer
from trainers.scorer import TokenScorer

LENGTHS = {"max_length": 400, "max_prompt_length": 200, "dtype": "float32", "batch_tokens": 120}
TEXTS = [f"{'the other one ' * (i % 5)}and {i}" for i in range(10)] + ["too long " * 200]
"""11 that no number of ranks here divides, of which the last has no verdict."""
PROMPTS = [Prompt((Turn("user", f"what is {i}?"),)) for i in range(len(TEXTS))]


def weighted(armorm: Path) -> RewardConfig:
    """Two models and a function between them."""
    function = {"reward": "function", "path": "tests.unit.rollouts.reward_functions.lengths"}
    parts: dict[str, Any] = {
        "first": {"weight": 1.0, "reward": "armorm", "name_or_path": str(armorm), **LENGTHS},
        "length": {"weight": -0.05, **function},
        "second": {"weight": 0.5, "reward": "armorm", "name_or_path": str(armorm), **LENGTHS},
    }
    parts["second"] |= {"dtype": "bfloat16", "batch_tokens": 4096}  # fewer batches than ranks
    return reward_of("weighted", WeightedConfig(parts=parts), 0.5)


def shared(config: RewardConfig, world: World, ranks: Ranks) -> Reward:
    """As ``jobs.online`` makes it: all of it on rank 0, its models elsewhere."""
    mine = config if world.is_main else config.models_alone()
    assert mine is not None
    reward = make_reward(mine)
    reward.share_over(ranks)
    return reward


def score(world: World, folder: Path) -> None:
    """Write what rank 0 gets of every reward, twice; the same on every rank."""
    ranks = Ranks()
    summed = shared(weighted(folder / "armorm"), world, ranks)

    def work() -> dict[str, Any]:
        found = []
        for _ in range(2):  # released in between
            found.append(summed.score(PROMPTS, TEXTS))
            summed.release()
        return {"scores": found, "metrics": {k: v for k, v in summed.metrics.items() if "reward_" in k}}

    (folder / f"{world.size}-{world.rank}.json").write_text(json.dumps(ranks.on_main(work)))
    summed.close()


def fail(world: World, folder: Path, how: str) -> None:
    """The last rank has no weights any more when it is to score, or another model than it is taken for."""
    own, last = folder / f"armorm-{how}-{world.rank}", world.rank == world.size - 1
    shutil.copytree(folder / ("small" if last and how == "vocabulary" else "armorm"), own)
    line = Ranks()
    reward = shared(weighted(own), world, line)
    if last and how == "weights":
        (own / "model.safetensors").unlink()
    try:
        line.on_main(lambda: reward.score(PROMPTS, TEXTS))
        said = "nothing"
    except UserError as error:
        said = f"{type(error).__name__}: {error}"
    line.on_main(reward.release)  # they listen still
    (folder / f"{how}-{world.rank}").write_text(said)
    reward.close()


def fall(world: World, folder: Path, which: str) -> None:
    """A rank fails between the gathers of a hand-over, which the others wait in. They say why, and end."""
    line = Ranks()

    def gathers(_: None) -> None:
        for turn in range(3):
            if turn == 1 and world.rank == int(which):
                raise MemoryError("no room for the weights")
            dist.all_reduce(torch.zeros(1))

    send = line.collective(gathers)
    try:
        with others_end():
            line.on_main(lambda: send(None))
    except UserError as error:
        (folder / f"fell-{which}-{world.rank}").write_text(f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("scoring")
    save_armorm(made / "armorm")
    save_armorm(made / "small", vocab_size=32)
    in_world(score, 1, made)
    return made


def test_scores_are_those_of_one_rank_to_the_bit(folder):
    scores = json.loads((folder / "1-0.json").read_text())["scores"][0]
    assert len(scores) == len(TEXTS) and scores[-1] is None
    assert len(set(scores)) == len(TEXTS), "equal scores would hide another order"
    in_world(score, 3, folder)
    for rank in range(3):
        assert (folder / f"3-{rank}.json").read_text() == (folder / "1-0.json").read_text()


ENDS = {
    "weights": "ConfigError: reward.armorm.name_or_path=",
    "vocabulary": "ShareError: rank 2 could not do its share: IndexError: index out of range",
}


@pytest.mark.parametrize("how", ENDS)
def test_one_rank_that_fails_ends_all_with_its_sentence(folder, how):
    in_world(fail, 3, folder, how)
    said = {(folder / f"{how}-{rank}").read_text() for rank in range(3)}
    assert len(said) == 1 and ENDS[how] in said.pop()


@pytest.mark.parametrize("which", [0, 1])
def test_a_rank_that_fails_within_a_hand_over_ends_all_with_its_message(folder, which):
    ranks = world_of(fall, 3, folder, str(which))
    assert [one.wait() for one in ranks] == [1] * 3
    for rank in {0, 1, 2} - ({which} if which else set()):
        said = (folder / f"fell-{which}-{rank}").read_text()
        assert said == f"ShareError: rank {which} failed: MemoryError: no room for the weights"


NO_ROOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
NO_LOGITS = MemoryError("no room for logits")
FALLS: dict[str, tuple[type, str, Callable[..., bool], Exception | signal.Signals]] = {
    "step": (BasicTrainer, "step", lambda self, *_: self.progress.step == 2, NO_LOGITS),
    "loss": (BasicTrainer, "mean_loss", lambda self, *_: self.progress.step == 1, NO_ROOM),
    "evaluation": (Evaluator, "evaluate", lambda *_: True, NO_ROOM),
    "answers": (EmbeddedSampler, "share", lambda self, prompts, n, *_: n == 2, NO_ROOM),
    "asked": (TokenScorer, "score_without_gradient", lambda *_: True, signal.SIGTERM),
    "killed": (TokenScorer, "score_without_gradient", lambda *_: True, signal.SIGKILL),
}
"""Where rank 1 ends alone: class, method, when, and how. A signal comes before anything can be saved."""
ONLINE = ("online=true", "rounds.contexts=24", "rounds.contexts_per_round=12", "rounds.samples=2")
SHORT = "rank 1 failed: ShortOfMemoryError: out of memory (CUDA out of memory. "


def falls(how: str, *words: str) -> None:
    owner, name, when, end = FALLS[how]
    compute = getattr(owner, name)

    def fails(self: Any, *of: Any, **more: Any) -> Any:
        if os.environ["RANK"] == "1" and when(self, *of):
            if isinstance(end, Exception):
                raise end
            os.kill(os.getpid(), end)
        return compute(self, *of, **more)

    setattr(owner, name, fails)
    guarded(lambda: run(*compose(*words), Signals()))


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("step", 1, "error: rank 1 failed: MemoryError: no room for logits"),
        *((place, 1, SHORT) for place in ("loss", "evaluation", "answers")),
        ("asked", 75, "another rank was requested to stop and has ended"),
        ("killed", 1, "error: the process of another rank has ended without a message"),
    ],
)
def test_a_rank_that_ends_alone_ends_all_with_one_message(tmp_path, how, code, message):
    """Where memory is short, it has the number to type."""
    save_tiny_adder(tmp_path / "model")
    words = command(tmp_path, "falls", 6, f"model.name_or_path={tmp_path / 'model'}")
    if how == "answers":
        words = [*(word for word in words if not word.startswith("n_examples=")), *ONLINE]
    program = "import sys; from tests.distributed.test_ranks import falls; falls(*sys.argv[1:])"
    ranks = programs.ranks(2, "-c", program, how, *words[1:])
    codes = [one.wait(300) for one in ranks]
    said = [one.said() for one in ranks]
    assert message in said[0] and "Traceback" not in said[0] and codes[0] == code
    assert said[0].splitlines()[-1].startswith(message) or message == SHORT
    if how == "step":
        assert message in said[1] and "in fails" in said[1], "where it failed stands in its own log"
    if message == SHORT:
        assert all("in a step, use model.microbatch_tokens=" in one for one in said)
        assert all("model.eval_batch_size=" in one for one in said)
