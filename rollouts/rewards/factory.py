"""Construction of a reward from its settings. The reward's yaml alone decides which one it is
(``_target_``)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from common.imports import import_function
from config.schema_rewards import RewardConfig
from rollouts.rewards.base import Reward

if TYPE_CHECKING:
    import torch


def make_reward(
    config: RewardConfig, device: torch.device | str = "cpu", log_dir: Path | None = None
) -> Reward:
    """Return the reward that ``config`` describes. A model loads onto ``device`` when it is first needed.
    Worker processes write what they print to ``log_dir``, which is created at the first ``score``; with None
    their output is not kept.

    The reward's module is imported here and not earlier, because a verifier needs no torch and a judge no
    transformers. Raises ConfigError for a function that cannot be imported, a tokenizer without a chat
    template, or a missing math-verify.
    """
    make = import_function("reward._target_", config.target)
    return Reward(make(config.settings, device, log_dir), config.max_missing)
