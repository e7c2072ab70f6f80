"""When humanline can change nothing: what is said of the schedule holds of the weights, to the bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from config.schema import Config
from jobs.idle_humanline import notice
from jobs.online import round_steps
from jobs.preflight import check_with_torch, check_without_torch
from jobs.prepare import prepare
from jobs.run_folder import RunFolder
from models.distributed import start
from tests.engine import Log, engine_config, make_segment, make_trainer, weights
from tests.tiny import make_config
from trainers.assembly import Offline, trainer_class

ONLINE = ("online=true", "model.batch_size=2", "wandb.enabled=false")
FREE = ("log_epsilon_P=-.inf", "log_epsilon_R=.inf")


def trained(config: Config, rounds: list[int]) -> dict[str, torch.Tensor]:
    """The weights behind rounds of so many steps each, of random pairs."""
    trainer = make_trainer(config)
    size = config.model.batch_size
    segments = [
        dataclasses.replace(make_segment(config, steps * size, seed=i), index=i)
        for i, steps in enumerate(rounds)
    ]
    trainer.train(Offline(*segments), Log())
    return weights(trainer)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> dict[tuple[int, ...], dict[str, torch.Tensor]]:
    """The weights without humanline, by the rounds' steps."""
    config = engine_config(tmp_path_factory.mktemp("plain"), "dpo", *ONLINE)
    return {rounds: trained(config, list(rounds)) for rounds in SHAPES}


SHAPES = [(1, 1, 1), (3, 3), (3, 1, 3)]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_without_clipping_it_speaks_exactly_where_the_weights_are_the_same(plain, tmp_path, k):
    config = engine_config(tmp_path, "dpo", *ONLINE, *FREE, "humanline=true", f"sync_freq={k}")
    for rounds, without in plain.items():
        said = notice(config, list(rounds), exact=True)
        assert (said is not None) == same(trained(config, list(rounds)), without), (k, rounds, said)


@pytest.mark.parametrize("k", [2, 4])
def test_a_reference_that_outlives_rounds_sees_them_as_one(tmp_path, k):
    kept = (*ONLINE, *FREE, "rounds.reset_reference=false", f"sync_freq={k}")
    with_it, without = (engine_config(tmp_path, "dpo", *kept, f"humanline={on}") for on in ("true", "false"))
    for rounds in ([1, 1, 1], [3, 3]):
        said = notice(with_it, rounds, exact=True)
        assert (said is not None) == same(trained(with_it, rounds), trained(without, rounds)), (k, rounds)
        assert (said is not None) == (sum(rounds) <= k + 1)


@pytest.mark.parametrize(
    ("words", "rounds", "exact", "clips"),
    [
        (["humanline=true"], [2, 2], False, True),
        (["humanline=true", "humanline_mode=sample"], [1, 1], False, True),
        (["humanline=true"], [3, 3], False, False),
        ([], [1, 1], True, False),
    ],
)
def test_a_bound_that_may_bind_is_no_silence_about_syncing(words, rounds, exact, clips):
    said = notice(make_config("loss=dpo", "online=true", *words), rounds, exact=exact)
    assert (said is not None and "only clips" in said) if clips else said is None


@pytest.mark.parametrize(
    ("words", "said"),
    [(FREE, "humanline=true can change nothing in this run: with"), ((), "humanline=true only clips")],
)
def test_a_prepared_run_says_it_and_prints_nothing(tmp_path, capsys, words, said):
    given = ("loss=dpo", "humanline=true", "dry_run=true", f"runs_dir={tmp_path}", "n_examples=64", *words)
    config = make_config(*given)
    loss, data = check_with_torch(config, []), check_without_torch(config, "r")
    prepared = prepare(config, data, loss, RunFolder(config, "r"), start())
    assert capsys.readouterr().out == "" and f"note: {said}" in "\n".join(prepared.messages)


def test_the_steps_of_rounds_are_those_that_are_planned():
    contexts = ("rounds.contexts=20", "rounds.contexts_per_round=8")
    config = make_config("loss=dpo", "online=true", *contexts, "model.batch_size=4", "rounds.passes=2")
    trainer = trainer_class(config)
    assert round_steps(config, trainer) == ([4, 4, 2], False)
    replaying = dataclasses.replace(config.rounds, replay=0.25, passes=1)
    assert round_steps(dataclasses.replace(config, rounds=replaying), trainer) == ([2, 2, 2], False)
