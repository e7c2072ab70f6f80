"""Token scores of the policy and its reference, which every loss, every evaluation and every no-gradient pass
uses."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from data.types import Microbatch, Sequences
from models.reference import Reference
from models.sharding import reshard
from trainers.humanline import Humanline, RejectionKey
from trainers.losses.base import Mean, TokenScores


class TokenScorer:
    """Scores rows under the current policy, together with the log-probabilities that the reference has stored
    for them."""

    def __init__(
        self,
        policy: nn.Module,
        reference: Reference | None,
        humanline: Humanline,
        anchor: Reference | None = None,
        ratio_to_behavior: bool = False,
        entropy: bool = False,
    ) -> None:
        """``reference``: None for a loss that has none; the policy's own values then take its place.
        ``humanline``: transforms the log-ratio between the two; ``Humanline()`` leaves it unchanged.
        ``anchor``: scores of the policy that a KL term compares with; None: those of the reference.
        ``ratio_to_behavior``: whether ratios are taken against the policy that wrote a token, where it is
        known, and not against the reference. ``entropy``: whether scores include the entropies, which cost
        one more product with the head."""
        self.policy = policy
        self.reference = reference
        self.humanline = humanline
        self.anchor = anchor
        self.ratio_to_behavior = ratio_to_behavior
        self.entropy = entropy
        self.unmoved = False
        """Whether the policy still has the reference's weights, so that its log-probabilities are known."""

    def score(self, step: int, sequences: Sequences) -> TokenScores:
        """Return the scores of R rows at optimizer step ``step``, with the policy's gradient.

        Raises StoppedError for a row that the reference did not score for this step.
        """
        if self.unmoved and self.reference is not None:
            return self.compared(step, sequences, self.reference.lookup(step, sequences))
        if not self.entropy:
            return self.compared(step, sequences, self.policy(sequences))
        policy, entropy = self.policy(sequences, entropy=True)
        return replace(self.compared(step, sequences, policy), entropy=entropy)

    def compared(self, step: int, sequences: Sequences, policy: torch.Tensor) -> TokenScores:
        """Return the scores that the policy's log-probabilities [R, T] of these rows give."""
        reference = policy.detach() if self.reference is None else self.reference.lookup(step, sequences)
        anchor = None if self.anchor is None else self.anchor.lookup(step, sequences)
        if self.ratio_to_behavior and sequences.behavior_logprobs is not None:
            mu, pi_ref = sequences.behavior_logprobs, reference
            anchor, reference = pi_ref if anchor is None else anchor, torch.where(mu.isnan(), pi_ref, mu)
        scores = self.humanline.scores(policy, reference, sequences.mask, rejection_key(step, sequences))
        return scores if anchor is None else replace(scores, anchor=anchor)

    @torch.no_grad()
    def score_without_gradient(self, step: int, sequences: Sequences) -> TokenScores:
        """Return the same scores without gradient. The model is sharded again after the forward
        (``models.reference.score`` says why)."""
        scores = self.score(step, sequences)
        reshard(self.policy)
        return scores

    def metrics(self, step: int, micro: Microbatch, scores: TokenScores) -> dict[str, Mean]:
        """Return what humanline logs of a microbatch's ``scores`` (``Humanline.metrics``)."""
        return self.humanline.metrics(scores, rejection_key(step, micro.sequences))


def rejection_key(step: int, sequences: Sequences) -> RejectionKey:
    """Return the key that the random rejection of these rows' tokens depends on."""
    return RejectionKey(step, [row.key for row in sequences.rows])
