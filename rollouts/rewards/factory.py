"""A reward made from its settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from config.schema_rewards import RewardConfig
from rollouts.rewards.base import Checked, Reward, Scorer

if TYPE_CHECKING:
    import torch


def make_reward(
    config: RewardConfig, device: torch.device | str = "cpu", log_dir: Path | None = None
) -> Reward:
    """The reward that ``config`` describes. Models load when they are first asked, on ``device``; worker
    processes write what they print to ``log_dir``, which is made with the first ``score``; None: nowhere.

    Raises ConfigError: a function that cannot be imported, a tokenizer without a chat template, math-verify
    not installed.
    """
    return Checked(_scorer(config, device, log_dir), config.max_missing)


def _scorer(config: RewardConfig, device: torch.device | str, log_dir: Path | None) -> Scorer:
    """Modules are imported when they are used: a verifier needs no torch, and a judge no transformers."""
    if config.function is not None:
        from rollouts.rewards.function import FunctionReward

        return FunctionReward(config.function, log_dir)
    if config.verifier is not None:
        from rollouts.rewards.verifier import VerifierReward

        return VerifierReward(config.verifier, log_dir)
    if config.armorm is not None:
        from rollouts.rewards.armorm import armorm

        return armorm(config.armorm, device)
    if config.classifier is not None:
        from rollouts.rewards.models import classifier

        return classifier(config.classifier, device)
    assert config.judge is not None, "RewardConfig has exactly one section"
    from rollouts.rewards.judge import JudgeReward

    return JudgeReward(config.judge)
