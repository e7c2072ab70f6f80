"""Corrections for samples that another policy wrote, by a weight w that multiplies each token's loss term and
has no gradient.

mu is the behaviour policy, which wrote the completion, and ``rho_t = exp(log pi_ref(y_t) - log mu(y_t))``,
which humanline does not clip.

| ``correction=`` | w | source |
|---|---|---|
| ``truncated`` | rho_t, clamped to [low, high] | truncated importance sampling (Ionides 2008) |
| ``masked`` | rho_t where low <= rho_t <= high, else 0 | IcePop (Ling team 2025, arXiv 2510.18855) |
| ``sequence_masked`` | rho_t in sequences whose geometric mean of rho lies in [low, high], else 0 | as IcePop, per sequence |
| ``negative_masked`` | 0 in sequences with A < 0 and mean_t(log mu - log pi_theta) > delta, else 1 | DeepSeek-V3.2 (2025, arXiv 2512.02556) |
| ``trust_region_masked`` | 0 in sequences with max_t abs(log pi_theta - log mu) > delta, else 1 | TRM (Li et al. 2025, arXiv 2512.23075, its estimate of the largest token KL from samples) |

A token whose mu is not known has rho = 1; means are over the tokens whose mu is known. A correction does not
change the divisor of the loss. The weight of a KL penalty is 1: it is not part of a token's term.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.imports import import_function
from config.schema import Config, CorrectionConfig
from data.types import Microbatch
from trainers.losses.base import Mean, TokenScores, mean_where, token_mean


@dataclass(frozen=True)
class Behavior:
    """Log-probabilities of a microbatch's tokens under the behaviour policy."""

    logprobs: Tensor
    """[R, T] nats; 0 where not known"""
    recorded: Tensor
    """[R, T] bool: completion tokens whose log mu is known"""

    @classmethod
    def of(cls, micro: Microbatch, mask: Tensor) -> Behavior:
        logprobs = micro.sequences.behavior_logprobs
        if logprobs is None:
            return cls(torch.zeros_like(mask, dtype=torch.float32), torch.zeros_like(mask))
        recorded = mask & ~logprobs.isnan()
        return cls(torch.where(recorded, logprobs, 0.0), recorded)

    def metrics(self, scores: TokenScores) -> dict[str, Mean]:
        """Return ``engine_gap``, the mean of log pi_theta - log mu, and ``behavior_kl``, KL(mu || pi_theta)
        by the k3 estimator, r - 1 - log r with r = pi_theta / mu. Both are in nats per token, over the tokens
        whose mu is known."""
        gap = torch.where(self.recorded, scores.policy.detach() - self.logprobs, 0.0)
        return {
            "engine_gap": mean_where(gap, self.recorded),
            "behavior_kl": mean_where(torch.expm1(gap) - gap, self.recorded),
        }


Weigh = Callable[[CorrectionConfig, TokenScores, Behavior, Tensor], Tensor]
"""(settings, scores, mu, advantages [R]) -> w [R, T]"""


def log_rho(scores: TokenScores, behavior: Behavior) -> Tensor:
    """Return [R, T], log pi_ref - log mu in nats; 0 where mu is not known."""
    return torch.where(behavior.recorded, scores.reference - behavior.logprobs, 0.0)


def truncated(
    settings: CorrectionConfig, scores: TokenScores, behavior: Behavior, advantages: Tensor
) -> Tensor:
    """Return w [R, T]: rho clamped to [low, high]; 1 where mu is not known."""
    rho = log_rho(scores, behavior).exp()
    return torch.where(behavior.recorded, rho.clamp(settings.low, settings.high), 1.0)


def masked(settings: CorrectionConfig, scores: TokenScores, behavior: Behavior, advantages: Tensor) -> Tensor:
    """Return w [R, T]: rho inside [low, high] and 0 outside; 1 where mu is not known."""
    rho = log_rho(scores, behavior).exp()
    inside = (settings.low <= rho) & (rho <= settings.high)
    return torch.where(behavior.recorded, torch.where(inside, rho, 0.0), 1.0)


def sequence_masked(
    settings: CorrectionConfig, scores: TokenScores, behavior: Behavior, advantages: Tensor
) -> Tensor:
    """Return w [R, T]: rho (1 where mu is not known), or 0 in rows whose geometric mean of rho is outside
    [low, high]."""
    logs = log_rho(scores, behavior)
    mean = token_mean(logs, behavior.recorded).exp()
    inside = ((settings.low <= mean) & (mean <= settings.high)) | ~behavior.recorded.any(dim=-1)
    return torch.where(inside[:, None], logs.exp(), 0.0)


def negative_masked(
    settings: CorrectionConfig, scores: TokenScores, behavior: Behavior, advantages: Tensor
) -> Tensor:
    """Return w [R, T]: 0 in rows with a negative advantage whose mean of log mu - log pi_theta is above
    delta, else 1."""
    away = token_mean(behavior.logprobs - scores.policy.detach(), behavior.recorded)
    dropped = (advantages < 0) & (away > settings.delta)
    return (~dropped)[:, None].expand_as(scores.mask).float()


def trust_region_masked(
    settings: CorrectionConfig, scores: TokenScores, behavior: Behavior, advantages: Tensor
) -> Tensor:
    """Return w [R, T]: 0 in rows with a token whose |log pi_theta - log mu| is above delta, else 1."""
    moved = torch.where(behavior.recorded, scores.policy.detach() - behavior.logprobs, 0.0).abs()
    inside = moved.amax(dim=-1) <= settings.delta
    return inside[:, None].expand_as(scores.mask).float()


@dataclass(frozen=True)
class Correction:
    """The correction that ``correction=`` selects. Without one, scores pass through as the same object."""

    settings: CorrectionConfig
    weigh: Weigh | None = None

    @classmethod
    def from_config(cls, config: Config) -> Correction:
        """Return the correction of ``config``. Raises ConfigError where its function cannot be imported."""
        target = config.correction._target_
        weigh = None if target is None else import_function("correction._target_", target)
        return cls(config.correction, weigh)

    @torch.no_grad()
    def with_weights(self, scores: TokenScores, micro: Microbatch) -> TokenScores:
        """Return the scores with the weights of their tokens."""
        if self.weigh is None:
            return scores
        behavior = Behavior.of(micro, scores.mask)
        return replace(scores, weights=self.weigh(self.settings, scores, behavior, micro.labels))

    def metrics(self, scores: TokenScores, micro: Microbatch) -> dict[str, Mean]:
        """Return ``correction_masked``, the share of tokens with w = 0; the means of ``correction_weight``
        and of its square (see ``with_sample_size``); and ``correction_unknown``, the share of tokens whose mu
        is not known."""
        if scores.weights is None:
            return {}
        unknown = ~Behavior.of(micro, scores.mask).recorded
        return {
            "correction_weight": mean_where(scores.weights, scores.mask),
            "correction_weight_squared": mean_where(scores.weights.square(), scores.mask),
            "correction_masked": mean_where((scores.weights == 0).float(), scores.mask),
            "correction_unknown": mean_where(unknown.float(), scores.mask),
        }


def with_sample_size(means: dict[str, float | None]) -> dict[str, float | None]:
    """Return a step's metrics with ``effective_sample_size``, (sum w)^2 / (n sum w^2), in place of the mean
    of w^2."""
    if "correction_weight_squared" not in means:
        return means
    mean, square = means["correction_weight"], means.pop("correction_weight_squared")
    size = None if mean is None or not square else mean**2 / square
    return means | {"effective_sample_size": size}
