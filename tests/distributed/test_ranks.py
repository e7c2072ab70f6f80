"""Reward models on several ranks: the scores of one to the bit, and one end for all where one fails."""

from __future__ import annotations

import json

import pytest

from common.ports import free_port
from models.distributed import Ranks, start
from tests import programs
from tests.distributed import shares
from tests.distributed.shares import TEXTS, weighted
from tests.distributed.torture import command
from tests.programs import in_ranks, until
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


@pytest.mark.parametrize("ranks", [2, 3])
def test_scores_are_those_of_one_rank_to_the_bit(folder, ranks):
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
    until(lambda: all(one.poll() is not None for one in ranks), lambda: ranks[0].said())
    assert [one.poll() == 0 for one in ranks] == [False] * 3
    assert [(folder / f"ended-{rank}").exists() for rank in range(3)] == [True, True, False]


@pytest.mark.parametrize("which", [0, 1])
def test_a_rank_that_fails_within_a_hand_over_ends_all_with_its_message(folder, which):
    code = "import sys; from tests.distributed.shares import fall; fall(int(sys.argv[1]), 3, *sys.argv[2:])"
    store = folder / f"store-fell-{which}"
    ranks = [programs.start("-c", code, str(rank), store, folder, str(which)) for rank in range(3)]
    until(lambda: all(one.poll() is not None for one in ranks), lambda: ranks[0].said())
    assert [one.poll() for one in ranks] == [1] * 3
    for rank in {0, 1, 2} - ({which} if which else set()):
        said = (folder / f"fell-{which}-{rank}").read_text()
        assert said == f"ShareError: rank {which} failed: MemoryError: no room for the weights"


FALLS = """
import sys
from config.cli import guarded
from train import compose, train
from trainers.basic import BasicTrainer

step = BasicTrainer.step

def falls(self, *rest):
    if self.world.rank == 1 and self.progress.step == 2:
        raise MemoryError("no room for the logits")
    return step(self, *rest)

BasicTrainer.step = falls
guarded(lambda: train(*compose(*sys.argv[1:])))
"""


def test_a_rank_that_fails_in_a_step_says_why_to_all(tmp_path):
    save_tiny_adder(tmp_path / "model")
    words = command(tmp_path, "falls", 6, 1, f"model.name_or_path={tmp_path / 'model'}")
    settings = words[words.index("train.py") + 1 :]
    alone = {"TORCHELASTIC_RUN_ID": "falls", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        programs.start("-c", FALLS, *settings, env=alone | {"WORLD_SIZE": "2", "RANK": str(rank)})
        for rank in range(2)
    ]
    until(lambda: all(one.poll() is not None for one in ranks), lambda: ranks[0].said())
    for one in ranks:
        assert "rank 1 failed: MemoryError: no room for the logits" in one.said()
    assert ranks[0].said().splitlines()[-1].startswith("error: rank 1 failed")
    assert "in falls" in ranks[1].said(), "where it failed stands in its own log"


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
