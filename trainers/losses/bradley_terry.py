"""Bradley-Terry loss of a reward model (Bradley and Terry, 1952; Ouyang et al., 2022, arXiv 2203.02155,
equation 1)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from trainers.losses.base import LossResult, paired_result


def bradley_terry(chosen: Tensor, rejected: Tensor, valid: Tensor) -> LossResult:
    """Return ``-log sigmoid(r_w - r_l)``, summed over the pairs.

    ``chosen``, ``rejected``: [n] scalar rewards of a classification head, with gradient. ``valid``: [n] bool,
    False for pairs that only fill up the batch; these have no effect.
    """
    margin = torch.where(valid, chosen - rejected, 0.0)
    return paired_result(-logsigmoid(margin), chosen, rejected, valid)
