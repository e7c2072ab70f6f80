"""The Bradley-Terry reward model (Bradley and Terry 1952; Ouyang et al. 2022, arXiv 2203.02155, equation
1)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from trainers.losses.base import LossResult, paired_result


def bradley_terry(chosen: Tensor, rejected: Tensor, valid: Tensor) -> LossResult:
    """``-log sigmoid(r_w - r_l)``, summed over the pairs.

    ``chosen``, ``rejected``: [n] scalar rewards of a classification head, with gradient. ``valid``: [n] bool,
    the pairs that are real; nothing of the others counts.
    """
    margin = torch.where(valid, chosen - rejected, 0.0)
    return paired_result(-logsigmoid(margin), chosen, rejected, valid)
