"""Humanline sampling (Definition 4.2), the random rejection of tokens of which humanline clipping is the
limit (Theorem 4.3).

A token is rejected where ``r < M_P B_P`` or ``1 / r < M_R B_R``, with r the likelihood ratio of policy to
reference and B_P, B_R two independent Beta variables. A rejected token keeps its value, unclamped, and loses
its gradient.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from config.schema import BetaConfig
from data.batches import to_device


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
