"""Token scores of the policy and its reference, which every loss, every evaluation and every no-gradient pass
uses."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from data.types import Sequences
from models.distributed import reshard
from models.reference import Reference
from trainers.humanline import Humanline, RejectionKey
from trainers.losses.base import TokenScores


class TokenScorer:
    """Scores rows under the current policy, together with the log-probabilities that the reference has stored
    for them."""

    def __init__(self, policy: nn.Module, reference: Reference | None, humanline: Humanline) -> None:
        """``reference``: None for a loss that has none; the policy's own values then take its place.
        ``humanline``: transforms the log-ratio between the two; ``Humanline()`` leaves it unchanged."""
        self.policy = policy
        self.reference = reference
        self.humanline = humanline
        self.reads_collision = False
        """Whether scores include ``collision``, which costs one more product with the head."""

    def score(self, step: int, sequences: Sequences) -> TokenScores:
        """Return the scores of R rows at optimizer step ``step``, with the policy's gradient.

        Raises KeyError for a row that the reference did not score for this step.
        """
        collision = None
        if self.reads_collision:
            policy, collision = self.policy(sequences, collision=True)
        else:
            policy = self.policy(sequences)
        reference = self.reference_logprobs(step, sequences, policy)
        scores = self.humanline.scores(policy, reference, sequences.mask, rejection_key(step, sequences))
        return scores if collision is None else replace(scores, collision=collision.detach())

    @torch.no_grad()
    def score_without_gradient(self, step: int, sequences: Sequences) -> TokenScores:
        """Return the same scores without gradient. The model is sharded again after the forward
        (``models.reference.score`` says why)."""
        scores = self.score(step, sequences)
        reshard(self.policy)
        return scores

    def reference_logprobs(self, step: int, sequences: Sequences, policy: torch.Tensor) -> torch.Tensor:
        """Return [R, T], the reference's log-probabilities in nats; without a reference, ``policy`` [R, T],
        detached."""
        return policy.detach() if self.reference is None else self.reference.lookup(step, sequences)


def rejection_key(step: int, sequences: Sequences) -> RejectionKey:
    """Return the key that the random rejection of these rows' tokens depends on."""
    return RejectionKey(step, [row.key for row in sequences.rows])
