"""Reward models on several ranks: the scores of one to the bit, and one end for all where one fails."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from config.cli import guarded
from jobs.evaluation import Evaluator
from jobs.signals import Signals
from models.distributed import Ranks, start
from rollouts.embedded import EmbeddedSampler
from tests import programs
from tests.distributed import shares
from tests.distributed.shares import TEXTS, weighted
from tests.distributed.torture import command
from tests.programs import in_ranks
from tests.tiny import save_tiny_adder
from tests.tiny_armorm import save_armorm
from train import compose, run
from trainers.basic import BasicTrainer
from trainers.scorer import TokenScorer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("scoring")
    save_armorm(made / "armorm")
    save_armorm(made / "small", vocab_size=32)
    in_ranks(shares.score, (1, str(made / "store-1"), str(made)), 1)
    return made


def test_one_rank_scores_all(folder):
    scores = json.loads((folder / "1-0.json").read_text())["scores"][0]
    assert len(scores) == len(TEXTS) and scores[-1] is None
    assert len(set(scores)) == len(TEXTS), "equal scores would hide another order"


def test_scores_are_those_of_one_rank_to_the_bit(folder):
    ranks = 3
    in_ranks(shares.score, (ranks, str(folder / f"store-{ranks}"), str(folder)), ranks)
    for rank in range(ranks):
        assert (folder / f"{ranks}-{rank}.json").read_text() == (folder / "1-0.json").read_text()


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("weights", "ConfigError: reward.armorm.name_or_path="),
        ("vocabulary", "ShareError: rank 2 could not do its share: IndexError: index out of range"),
    ],
)
def test_one_rank_that_fails_ends_all_with_its_sentence(folder, how, told):
    in_ranks(shares.fail, (3, str(folder / f"store-{how}"), str(folder), how), 3)
    said = {(folder / f"{how}-{rank}").read_text() for rank in range(3)}
    assert len(said) == 1 and told in said.pop()


def test_a_rank_that_is_killed_leaves_nobody_waiting(folder):
    code = "import sys; from tests.distributed.shares import die; die(int(sys.argv[1]), 3, *sys.argv[2:])"
    ranks = [programs.start("-c", code, str(rank), folder / "store-killed", folder) for rank in range(3)]
    codes = [one.wait() for one in ranks]
    assert all(codes)
    assert [(folder / f"ended-{rank}").exists() for rank in range(3)] == [True, True, False]


@pytest.mark.parametrize("which", [0, 1])
def test_a_rank_that_fails_within_a_hand_over_ends_all_with_its_message(folder, which):
    code = "import sys; from tests.distributed.shares import fall; fall(int(sys.argv[1]), 3, *sys.argv[2:])"
    store = folder / f"store-fell-{which}"
    ranks = [programs.start("-c", code, str(rank), store, folder, str(which)) for rank in range(3)]
    assert [one.wait() for one in ranks] == [1] * 3
    for rank in {0, 1, 2} - ({which} if which else set()):
        said = (folder / f"fell-{which}-{rank}").read_text()
        assert said == f"ShareError: rank {which} failed: MemoryError: no room for the weights"


NO_ROOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
FALLS: dict[str, tuple[type, str, Callable[..., bool], Exception | signal.Signals]] = {
    "step": (
        BasicTrainer,
        "step",
        lambda self, *_: self.progress.step == 2,
        MemoryError("no room for logits"),
    ),
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


def test_every_item_once_and_in_order_by_one_process():
    start()
    each = Ranks().map_over_ranks(lambda item: item * item)
    assert each([3, 1, 2]) == [9, 1, 4] and each([]) == []


def test_only_models_of_the_run_itself_are_on_other_ranks(tmp_path):
    config = weighted(tmp_path)
    alone = config.models_alone()
    assert alone is not None and list(alone.settings.parts) == ["first", "second"]
    del config.settings.parts["first"], config.settings.parts["second"]
    assert config.models_alone() is None
