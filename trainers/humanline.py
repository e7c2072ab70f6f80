"""Humanline (paper §5.1), which clips every token log-ratio upstream of the loss or, in its general form
(Definition 4.2), rejects tokens at random. Clipping is the limit of random rejection. The schedule by which
the reference follows one step behind the policy is in ``trainers.syncing``.

This is the only place where log-ratios are computed. With humanline off the bounds are infinite: the same
code runs, with exact values and without a branch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from common.errors import ConfigError, require
from common.imports import import_function
from config.schema import BetaConfig, Config
from trainers.losses.base import Mean, TokenScores, mean_where
from trainers.sampling import detach_rejected, log_thresholds, rejected


@dataclass(frozen=True)
class RejectionKey:
    """Inputs of a random rejection besides the seed: the step, and an identifier of each of the R rows
    (``Sequence.key``)."""

    step: int
    rows: Sequence[str]


def rule_of(settings: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
    """Return the function of ``humanline_rule`` with its numbers. Raises ConfigError unless it maps [R, T]
    log-ratios to [R, T]."""
    path, numbers = str(settings["_target_"]), {k: v for k, v in settings.items() if k != "_target_"}
    rule: Callable[[Tensor], Tensor] = partial(import_function("humanline_rule._target_", path), **numbers)
    raw = torch.linspace(-3, 3, 6).reshape(2, 3)
    try:
        shape = rule(raw).shape
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            "humanline_rule", dict(settings), f"cannot be called on log-ratios: {error}"
        ) from error
    require(shape == raw.shape, "humanline_rule", dict(settings), f"made {list(shape)} of [2, 3] log-ratios")
    return rule


@dataclass(frozen=True)
class Humanline:
    """Clipping bounds ``log_epsilon_P`` and ``log_epsilon_R``, in nats. With ``sampling``, tokens are
    rejected at random instead, by these constants and ``seed``."""

    log_epsilon_P: float = -math.inf
    log_epsilon_R: float = math.inf
    sampling: BetaConfig | None = None
    seed: int = 0
    rule: Callable[[Tensor], Tensor] | None = None
    """What is done to log-ratios, [R, T] in nats, in place of clipping (``humanline_rule``)."""

    @classmethod
    def from_config(cls, config: Config) -> Humanline:
        """Return the Humanline that ``humanline``, ``humanline_mode`` and their numbers ask for."""
        if not config.humanline:
            return cls()
        if config.humanline_mode == "sample":
            return cls(sampling=config.humanline_sampling, seed=config.seed)
        if config.humanline_mode == "rule":
            return cls(rule=rule_of(config.humanline_rule))
        return cls(config.log_epsilon_P, config.log_epsilon_R)

    def clip(self, log_ratio: Tensor) -> Tensor:
        """Clamp [R, T] log-ratios (nats) to [log eps_P, log eps_R]; the gradient is 0 outside (paper §5.1,
        listing C.2)."""
        return log_ratio.clamp(self.log_epsilon_P, self.log_epsilon_R)

    def scores(
        self, policy: Tensor, reference: Tensor, mask: Tensor, key: RejectionKey | None = None
    ) -> TokenScores:
        """Return TokenScores from policy and reference log-probabilities, [R, T] each, in nats. Only sampling
        reads ``key``, and it requires it."""
        raw = policy - reference
        if self.rule is not None:
            log_ratio = self.rule(raw)
        else:
            log_ratio = (
                self.clip(raw) if self.sampling is None else detach_rejected(raw, self._rejects(raw, key))
            )
        return TokenScores(policy, reference, log_ratio, mask)

    def metrics(self, scores: TokenScores, key: RejectionKey | None = None) -> dict[str, Mean]:
        """Return ``kl``, the mean raw token log-ratio, and ``clipped_low`` / ``clipped_high``, the share of
        tokens beyond each bound. With sampling, ``rejected`` replaces the two shares: the share of tokens
        that ``key`` rejects. With a rule, ``changed``: the share of tokens that it changes."""
        raw = (scores.policy - scores.reference).detach()
        kl = {"kl": mean_where(raw, scores.mask)}
        if self.sampling is not None:
            return kl | {"rejected": mean_where(self._rejects(raw, key).float(), scores.mask)}
        if self.rule is not None:
            return kl | {"changed": mean_where((self.rule(raw) != raw).float(), scores.mask)}
        return kl | {
            "clipped_low": mean_where((raw < self.log_epsilon_P).float(), scores.mask),
            "clipped_high": mean_where((raw > self.log_epsilon_R).float(), scores.mask),
        }

    def _rejects(self, raw: Tensor, key: RejectionKey | None) -> Tensor:
        """Return [R, T] bool, the rejected tokens: a function of seed, step, row and position alone, so it is
        the same on any number of ranks and on every call."""
        assert self.sampling is not None and key is not None and len(key.rows) == len(raw)
        return rejected(raw, log_thresholds(self.sampling, self.seed, key.step, key.rows, raw.shape[1]))
