"""Many runs composed at once have the settings, and the refusals, that each would have by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from omegaconf import DictConfig

from common.errors import UserError
from config import cli
from config.cli import compose_config
from config.schema import Config
from launch import state
from launch.grid import Run
from launch.state import Composer


def outcome(made: Any, *arguments: Any) -> Config | str:
    try:
        return made(*arguments)
    except UserError as error:
        return str(error)


SETTINGS: list[dict[str, Any]] = [
    {"lr": 1, "model.batch_size": 64, "loss.beta": 0.3},  # an int for a float, a free-form section
    {"experiment": "kto-offline-humanline", "log_epsilon_P": "-.inf", "log_epsilon_R": float("inf")},
    {"loss": "csft", "model.control_tokens": ["<a>", "<b>"]},  # config/loss/csft.yaml refers to it
    {"exp_name": "x", "runs_dir": "it's ${seed}", "wandb.entity": None, "humanline": 1},
    {"model.peft": {"r": 4}, "+loss.extra": 1},
    {"lr": -1.0},
    {"lr": "fast"},
    {"loss.betta": 1},
    {"rounds": 3},
    {"loss": "nope"},
    {"loss": "sft", "humanline": True},
    {"hydra.run.dir": "elsewhere"},
    {"~reward": None},
]


def test_composed_with_others_or_alone_is_the_same() -> None:
    composer = Composer()
    runs = [Run("s", f"s-c{i}", i, one, None) for i, one in enumerate(SETTINGS)]
    for run in [*runs, replace(runs[0], seed=7)]:
        assert outcome(composer.config, run) == outcome(compose_config, run.overrides()), run.settings


def test_runs_that_differ_by_their_seed_have_their_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file of settings refers to the seed, too."""
    composed = state.composed

    def files(words: list[str]) -> DictConfig:
        found = composed(words)
        found.runs_dir = "${seed}/${exp_name}"
        return found

    for module in (state, cli):
        monkeypatch.setattr(module, "composed", files)
    composer = Composer()
    for seed in (1, "3", -1):
        run = Run("s", f"s-c{seed}", seed, SETTINGS[0], None)  # type: ignore[arg-type]
        assert outcome(composer.config, run) == outcome(compose_config, run.overrides()), seed
