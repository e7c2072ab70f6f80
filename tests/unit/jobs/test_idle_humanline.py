"""When humanline can change nothing: what is said of the schedule holds of the weights, to the bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from config.schema import Config
from jobs.online import longest_round
from jobs.preflight import check_with_torch, check_without_torch
from jobs.prepare import idle_humanline, prepare
from jobs.run_folder import RunFolder
from models.distributed import start
from tests.engine import Log, engine_config, make_segment, make_trainer, weights
from tests.tiny import make_config
from trainers.assembly import Offline, trainer_class

ONLINE = ("online=true", "model.batch_size=2", "wandb.enabled=false")
FREE = ("log_epsilon_P=-.inf", "log_epsilon_R=.inf")


def trained(config: Config, rounds: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The weights behind rounds of so many steps each, of random pairs."""
    trainer = make_trainer(config)
    size = config.model.batch_size
    segments = [
        dataclasses.replace(make_segment(config, steps * size, seed=i), index=i)
        for i, steps in enumerate(rounds)
    ]
    trainer.train(Offline(*segments), Log())
    return weights(trainer)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(
    ("rounds", "k", "idle"), [((2, 2), 1, True), ((3,), 1, False), ((3,), 2, True), ((3, 3), 1, False)]
)
def test_it_speaks_where_the_weights_are_the_same(tmp_path, rounds, k, idle, kept):
    """``kept``: a reference that outlives rounds sees them as one."""
    given = (*ONLINE, *FREE, f"sync_freq={k}", f"rounds.reset_reference={not kept}".lower())
    with_it, without = (engine_config(tmp_path, "dpo", *given, f"humanline={on}") for on in ("true", "false"))
    found, other = trained(with_it, rounds), trained(without, rounds)
    longest, planned = sum(rounds) if kept else max(rounds), sum(rounds)
    idle = idle and not (kept and len(rounds) > 1)
    assert all(torch.equal(found[name], other[name]) for name in other) is idle
    assert (idle_humanline(with_it, longest, planned) is not None) is idle


@pytest.mark.parametrize(
    ("words", "longest", "said"),
    [
        (["humanline=true"], 2, "only clips"),
        (["humanline=true"], 1, "can change nothing"),
        (["humanline=true", "sync_mode=never"], 2, None),
    ],
)
def test_a_bound_that_may_bind_is_no_silence_about_syncing(words, longest, said):
    found = idle_humanline(make_config("loss=dpo", "online=true", *words), longest, 6)
    assert found is None if said is None else found is not None and said in found


def test_a_prepared_run_says_it_and_prints_nothing(tmp_path, capsys):
    given = ("loss=dpo", "humanline=true", "dry_run=true", f"runs_dir={tmp_path}", "n_examples=64", *FREE)
    config = make_config(*given)
    loss, data = check_with_torch(config, []), check_without_torch(config, "r")
    prepared = prepare(config, data, loss, RunFolder(config, "r"), start())
    assert capsys.readouterr().out == ""
    assert "note: humanline=true can change nothing in this run: with" in "\n".join(prepared.messages)


def test_the_steps_of_a_round_are_those_that_are_planned():
    contexts = ("rounds.contexts=20", "rounds.contexts_per_round=8", "rounds.passes=2")
    config = make_config("loss=dpo", "online=true", *contexts, "model.batch_size=4")
    assert longest_round(config, trainer_class(config)) == 4
