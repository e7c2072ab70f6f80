"""The runs of a sweep have the settings, and the refusals, that each would have by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from common.errors import UserError
from config.cli import compose_config
from config.schema import Config
from launch.grid import Run
from launch.state import Composer


def outcome(made: Any, *arguments: Any) -> Config | str:
    try:
        return made(*arguments)
    except UserError as error:
        return str(error)


SETTINGS: list[dict[str, Any]] = [
    {"lr": 1, "model.batch_size": 64, "loss.beta": 0.3, "log_epsilon_P": "-.inf"},
    {"runs_dir": "${seed}/${exp_name}", "wandb.entity": None, "humanline": 1},
    {"loss": "csft", "model.control_tokens": ["<a>", "<b>"]},  # config/loss/csft.yaml refers to it
    {"loss": "dpo", "model.peft": {"r": 4}, "+loss.extra": 1},
    {"loss.betta": 1},
    {"rounds": 3},
    {"hydra.run.dir": "elsewhere"},
    {"lr": -1.0},
    {"loss": "nope"},
    {"~reward": None},
]


def test_composed_with_others_or_alone_is_the_same() -> None:
    composer = Composer()
    runs = [Run("s", f"s-c{i}", i, one, None) for i, one in enumerate(SETTINGS)]
    for run in [*runs, *(replace(run, seed=seed) for run in runs[:2] for seed in (7, -1))]:
        assert outcome(composer.config, run) == outcome(compose_config, run.overrides()), run.settings


def test_sections_whose_keys_are_the_users_own_are_set() -> None:
    own = {"evaluations.held.path": "held.jsonl", "callbacks.mine._target_": "my.Observer"}
    config = Composer().config(Run("s", "s-c", 1, own, None))
    assert config.evaluations == {"held": {"path": "held.jsonl"}}
    assert config.callbacks == {"mine": {"_target_": "my.Observer"}}
