"""What a rank does in the tests of scoring on several ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.errors import StoppedError, UserError
from config.schema_rewards import RewardConfig
from data.types import Prompt, Turn
from models.distributed import Ranks, World, others_end, stop
from rollouts.rewards.base import Reward, make_reward
from rollouts.rewards.settings import WeightedConfig
from tests.distributed.joining import join
from tests.tiny import reward_of

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


def scored(world: World, armorm: Path) -> dict[str, Any]:
    """What rank 0 gets of every reward, twice; the same on every rank."""
    ranks = Ranks()
    summed = shared(weighted(armorm), world, ranks)

    def work() -> dict[str, Any]:
        found = []
        for _ in range(2):  # released in between
            found.append(summed.score(PROMPTS, TEXTS))
            summed.release()
        return {"scores": found, "metrics": {k: v for k, v in summed.metrics.items() if "reward_" in k}}

    given = ranks.on_main(work)
    summed.close()
    return given


def score(rank: int, ranks: int, store: str, folder: str) -> None:
    found = scored(join(rank, ranks, store), Path(folder) / "armorm")
    (Path(folder) / f"{ranks}-{rank}.json").write_text(json.dumps(found))
    stop()


def fail(rank: int, ranks: int, store: str, folder: str, how: str) -> None:
    """The last rank has no weights any more when it is to score, or another model than it is taken for."""
    own, world = Path(folder) / f"armorm-{how}-{rank}", join(rank, ranks, store)
    last = rank == ranks - 1
    shutil.copytree(Path(folder) / ("small" if last and how == "vocabulary" else "armorm"), own)
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
    (Path(folder) / f"{how}-{rank}").write_text(said)
    reward.close()
    stop()


def die(rank: int, ranks: int, store: str, folder: str) -> None:
    """The last rank is killed within its share."""
    join(rank, ranks, store)
    line = Ranks()

    def work(item: int) -> int:
        if rank == ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    each = line.map_over_ranks(work)
    try:
        line.on_main(lambda: each(list(range(10))))
    except StoppedError:
        raise AssertionError("who is killed says nothing") from None
    finally:
        (Path(folder) / f"ended-{rank}").touch()


def fall(rank: int, ranks: int, store: str, folder: str, which: str) -> None:
    """A rank fails between the gathers of a hand-over, which the others wait in. They say why, and end."""
    join(rank, ranks, store)
    line = Ranks()

    def gathers(_: None) -> None:
        for turn in range(3):
            if turn == 1 and rank == int(which):
                raise MemoryError("no room for the weights")
            dist.all_reduce(torch.zeros(1))

    send = line.collective(gathers)
    try:
        with others_end():
            line.on_main(lambda: send(None))
    except UserError as error:
        (Path(folder) / f"fell-{which}-{rank}").write_text(f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None
