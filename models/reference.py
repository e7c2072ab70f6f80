"""Log-probabilities of the reference model, without a copy of its weights.

At a sync point the reference *is* the policy, and the batches that will be trained until the next sync are
known. So the policy scores them then, without gradient, and only a few log-probabilities are kept instead of
a second copy of the weights. This takes no memory for a second model and no traffic to sync it, and LoRA and
sharding need nothing special. Losses and weights are bit-identical to a run with a second model
(tests/integration/test_two_models.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from common.errors import StoppedError
from data.types import Microbatch, Sequence, Sequences
from models.sharding import reshard

Scored = Iterable[tuple[int, list[Microbatch]]]
"""(step, this rank's microbatches of that step)"""


@torch.no_grad()
def score(policy: nn.Module, sequences: Sequences) -> Tensor:
    """Return [R, T], token log-probabilities under the current policy, in nats, float32, without gradient.

    The root of an FSDP2 model stays whole after a forward without backward; after the next optimizer step it
    would be silently stale (embedding, norm, head). So the model is sharded again after every no-gradient
    forward.
    """
    values = policy(sequences)
    reshard(policy)
    return values


class Reference:
    """Log-probabilities of the reference for the batches up to the next sync.

    With ``by_row`` False, scores belong to (step, row) and are computed on the very microbatches that will be
    trained (same shapes, same kernels), so policy and reference agree to the bit where their weights do. With
    ``by_row`` True, scores belong to the row and are computed once for all epochs.
    """

    def __init__(self, by_row: bool = False) -> None:
        self.by_row = by_row
        self.step = 0
        """The step whose weights the reference has."""
        self.scores: Mapping[str, Tensor] = {}

    def key(self, step: int, row: Sequence) -> str:
        return row.key if self.by_row else f"{step}/{row.key}"

    def refresh(self, policy: nn.Module, step: int, upcoming: Scored) -> None:
        """Make the current policy, before the update of ``step``, the reference: score ``upcoming`` and
        forget all other scores."""
        self.step, self.scores = step, {}
        new: dict[str, Tensor] = {}
        for at, microbatches in upcoming:
            new.update(self.scored(policy, at, microbatches))
        self.scores = new

    def advance(
        self, policy: nn.Module, step: int, done: int, delay: int, batch: Iterable[list[Microbatch]]
    ) -> None:
        """Make the policy of ``step`` the reference, where the scores that it needs are there already: score
        ``batch``, that of step ``done + delay``, with the current policy, and forget those of step
        ``done``."""
        kept = {key: values for key, values in self.scores.items() if not key.startswith(f"{done}/")}
        for microbatches in batch:
            kept |= self.scored(policy, done + delay, microbatches)
        self.step, self.scores = step, kept

    def scored(self, policy: nn.Module, step: int, microbatches: Iterable[Microbatch]) -> dict[str, Tensor]:
        """Return key -> [C] log-probabilities of the completion tokens that count, in nats, on the device,
        for every row of these microbatches."""
        new: dict[str, Tensor] = {}
        for sequences in sequences_of(microbatches):
            for row, values in zip(sequences.rows, score(policy, sequences), strict=True):
                if len(row.counted):
                    new[self.key(step, row)] = values[: len(row.counted)]
        return new

    def lookup(self, step: int, sequences: Sequences) -> Tensor:
        """Return [R, T], the reference's log-probabilities of these rows at this step, in nats, float32; 0
        where the mask is False.

        Raises StoppedError for a row that was not scored, as of other data than the checkpoint's."""
        device, width = sequences.mask.device, sequences.mask.shape[1]
        keys = [(row, self.key(step, row)) for row in sequences.rows]
        if any(len(row.counted) and key not in self.scores for row, key in keys):
            raise StoppedError(
                f"step {step} has rows that the reference did not score, so they are not the checkpoint's: "
                "bring the old data and tokenizer back, or start another run (exp_name)"
            )
        rows = [self.scores[key] if len(row.counted) else torch.zeros(0) for row, key in keys]
        out = torch.zeros(len(rows), width, device=device)
        for r, values in enumerate(rows):
            out[r, : len(values)].copy_(values, non_blocking=True)
        return out


def sequences_of(microbatches: Iterable[Microbatch]) -> Iterator[Sequences]:
    """Yield everything in these microbatches that needs a reference: the rows of the loss, and the mismatched
    rows."""
    for micro in microbatches:
        yield micro.sequences
        if micro.mismatched is not None:
            yield micro.mismatched


class SoftReference(nn.Module):
    """Weights of a reference that only moves towards the policy, or outlives a round, or the initial weights
    that the KL term of a round needs: the only second copy of the weights.

    It is a copy of the trained weights (with LoRA, of the adapters), sharded like them. As part of the
    policy's module it is in checkpoints, but never in the exported model."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        for name, parameter in policy.named_parameters():
            if parameter.requires_grad:
                self.register_buffer(_flat(name), parameter.detach().clone())

    @classmethod
    def part_of(cls, policy: nn.Module) -> SoftReference:
        """Return a copy that is added to the policy's module."""
        reference = cls(policy)
        policy.add_module("soft_reference", reference)
        return reference

    @torch.no_grad()
    def follow(self, policy: nn.Module, alpha: float) -> None:
        """Set reference <- alpha policy + (1 - alpha) reference; with ``alpha`` 1 it is exactly the
        policy."""
        for mine, parameter in self._pairs(policy):
            mine.lerp_(parameter, alpha)

    @contextmanager
    def in_place_of(self, policy: nn.Module) -> Iterator[None]:
        """Give the policy these weights for as long as the context lasts; after it the policy has its own
        again, bit for bit. Weights are swapped one tensor at a time, so that no third copy is ever held."""
        self._swap(policy)
        try:
            yield
        finally:
            self._swap(policy)

    @torch.no_grad()
    def _swap(self, policy: nn.Module) -> None:
        for mine, parameter in self._pairs(policy):
            held = parameter.detach().clone()
            parameter.copy_(mine)
            mine.copy_(held)

    def _pairs(self, policy: nn.Module) -> Iterator[tuple[Tensor, nn.Parameter]]:
        buffers = dict(self.named_buffers())
        return ((buffers[_flat(name)], p) for name, p in policy.named_parameters() if p.requires_grad)


def _flat(name: str) -> str:
    """Return ``name`` as a buffer's name, which must not have dots."""
    return name.replace(".", "/")
