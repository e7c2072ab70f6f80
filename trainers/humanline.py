"""Humanline (paper §5.1), which clips every token log-ratio upstream of the loss or, in its general form
(Definition 4.2), rejects tokens at random. Clipping is the limit of random rejection. The schedule by which
the reference follows one step behind the policy is in ``trainers.syncing``.

The log-ratios that losses read are computed here alone. With humanline off the bounds are infinite: the same
code runs, with exact values and without a branch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.errors import ConfigError
from common.imports import import_function
from config.schema import BetaConfig, Config
from data.batches import to_device
from trainers.losses.base import Mean, TokenScores, mean_where


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
    if shape != raw.shape:
        raise ConfigError("humanline_rule", dict(settings), f"made {list(shape)} of [2, 3] log-ratios")
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


# Humanline sampling (Definition 4.2), the random rejection of tokens of which clipping is the limit (Theorem
# 4.3). A token is rejected where ``r < M_P B_P`` or ``1 / r < M_R B_R``, with r the likelihood ratio of
# policy to reference and B_P, B_R two independent Beta variables. A rejected token keeps its value,
# unclamped, and loses its gradient.


def log_thresholds(constants: BetaConfig, seed: int, step: int, keys: Sequence[str], width: int) -> Tensor:
    """Return [2, R, T], ``log(M_P B_P)`` and ``log(M_R B_R)``, float64, on the CPU.

    ``constants``: ``B_P ~ Beta(gamma_P, beta_P)``, ``B_R ~ Beta(gamma_R, beta_R)``, and the bounds ``M_P`` on
    the ratio of policy to reference and ``M_R`` on the ratio of reference to policy, all above 0.
    ``keys``: identifiers of the R rows (``data.types.Sequence.key``). ``width``: T. A draw is a function of
    seed, step, key and position alone, so it does not depend on the rest of the batch, on its padding or on
    the number of ranks. Two rows with the same key in one step get the same draws.
    """
    bounds = (
        ("P", constants.M_P, constants.gamma_P, constants.beta_P),
        ("R", constants.M_R, constants.gamma_R, constants.beta_R),
    )
    drawn = np.empty((2, len(keys), width))
    for i, (side, bound, gamma, beta) in enumerate(bounds):
        for row, key in enumerate(keys):
            digest = hashlib.blake2b(f"{seed}/{step}/{key}/{side}".encode(), digest_size=16).digest()
            # Each row has its own counter-based generator: numpy fills a row from its first position on, so a
            # longer row only appends draws.
            generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
            with np.errstate(divide="ignore"):  # a draw that underflows to 0 rejects nothing: log 0 = -inf
                drawn[i, row] = math.log(bound) + np.log(generator.beta(gamma, beta, size=width))
    return torch.from_numpy(drawn)


def rejected(log_ratio: Tensor, thresholds: Tensor) -> Tensor:
    """Return [R, T] bool, the tokens that Definition 4.2 rejects. ``thresholds``: [2, R, T], from
    ``log_thresholds``."""
    log_P, log_R = to_device(thresholds, log_ratio.device)
    value = log_ratio.detach().double()
    return (value < log_P) | (-value < log_R)


def detach_rejected(log_ratio: Tensor, reject: Tensor) -> Tensor:
    """Return ``log_ratio`` [R, T] with unchanged values, and without gradient where ``reject`` is True."""
    return torch.where(reject, log_ratio.detach(), log_ratio)
