"""A reward made from its settings. Which one is said by its yaml alone (``_target_``)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from common.imports import import_function
from config.schema_rewards import RewardConfig
from rollouts.rewards.base import Checked, Reward

if TYPE_CHECKING:
    import torch


def make_reward(
    config: RewardConfig, device: torch.device | str = "cpu", log_dir: Path | None = None
) -> Reward:
    """The reward that ``config`` describes. Models load when they are first asked, on ``device``. Worker
    processes write what they print to ``log_dir``, which is made with the first ``score``; None: nowhere.

    Its module is imported here and not before: a verifier needs no torch, and a judge no transformers. Raises
    ConfigError: a function that cannot be imported, a tokenizer without a chat template, math-verify not
    installed.
    """
    make = import_function("reward._target_", config.target)
    return Checked(make(config.settings, device, log_dir), config.max_missing)
