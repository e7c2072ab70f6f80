"""Reward models on several ranks: the scores of one to the bit, and one end for all where one fails."""

from __future__ import annotations

import json
import signal

import pytest

from models.distributed import Ranks, start
from tests import programs
from tests.distributed import shares
from tests.distributed.shares import TEXTS, weighted
from tests.distributed.torture import command
from tests.programs import in_ranks
from tests.tiny import save_tiny_adder
from tests.tiny_armorm import save_armorm


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


FALLS = """
import os
import sys
import torch
from config.cli import guarded
from jobs.signals import Signals
from train import compose, run
from trainers.basic import BasicTrainer
from trainers.scorer import TokenScorer

def falls(self, *rest):
    if self.world.rank == 1 and self.progress.step == 2:
        raise MemoryError("no room for the logits")
    return step(self, *rest)

def has_no_room(self, *rest):
    if self.world.rank == 1 and self.progress.step == 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return mean_loss(self, *rest)

def is_hit(self, *rest, **named):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), int(sys.argv[1]))
    return score(self, *rest, **named)

step, mean_loss, score = BasicTrainer.step, BasicTrainer.mean_loss, TokenScorer.score_without_gradient
if sys.argv[1] == "fails":
    BasicTrainer.step = falls
elif sys.argv[1] == "memory":
    BasicTrainer.mean_loss = has_no_room
else:
    TokenScorer.score_without_gradient = is_hit
guarded(lambda: run(*compose(*sys.argv[2:]), Signals()))
"""


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("fails", 1, "error: rank 1 failed: MemoryError: no room for the logits"),
        ("memory", 1, "rank 1 failed: ShortOfMemoryError: out of memory (CUDA out of memory. "),
        (str(int(signal.SIGTERM)), 75, "another rank was requested to stop and has ended"),
        (str(int(signal.SIGKILL)), 1, "error: the process of another rank has ended without a message"),
    ],
)
def test_a_rank_that_ends_alone_ends_all_with_one_message(tmp_path, how, code, message):
    """It fails in a step, or gets a signal while there is nothing to save yet."""
    save_tiny_adder(tmp_path / "model")
    words = command(tmp_path, "falls", 6, f"model.name_or_path={tmp_path / 'model'}")
    ranks = programs.ranks(2, "-c", FALLS, how, *words[1:])
    codes = [one.wait(300) for one in ranks]
    said = ranks[0].said()
    assert message in said and "Traceback" not in said and codes[0] == code
    assert said.splitlines()[-1].startswith(message) or how == "memory"
    if how == "fails":
        assert message in ranks[1].said()
        assert "in falls" in ranks[1].said(), "where it failed stands in its own log"
    if how == "memory":
        assert all("in a step, use model.microbatch_tokens=" in one.said() for one in ranks)


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
