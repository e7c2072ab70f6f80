"""The records that everything else passes around: what a person wrote (Prompt, Completion, Group), what a
tokenizer made of it (Sequence, Example) and what a device computes on (Sequences, Microbatch).

``Source -> Group -> Example -> Microbatch -> TokenScores -> LossResult -> step``: nothing after the source
knows whether the data were sampled from the policy a minute ago or published last year, which is what makes
the paper's comparison a controlled one.

Shapes: R rows (sequences), T completion positions (padded to the longest completion of the microbatch; tokens
that do not count have none), B x L the padded token grid (or 1 x N when rows are packed), M completion tokens
in all.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from common.errors import DataError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Turn:
    """One message of a conversation. ``role`` is ``system``, ``user``, ``assistant`` or ``tool``."""

    role: str
    content: str
    calls: str = ""
    """What the message says of calls of tools, as JSON (``data.tool_calls``); "" for nothing."""

    @property
    def message(self) -> dict[str, Any]:
        """As chat templates, files and reward functions have it."""
        said: dict[str, Any] = {"role": self.role, "content": self.content}
        return said | json.loads(self.calls) if self.calls else said


@dataclass(frozen=True)
class Prompt:
    """What a completion answers: the conversation up to and including the last user turn, or the result of
    the last tool."""

    turns: tuple[Turn, ...]
    reference_answer: str | None = None
    """The reference answer that a verifier compares with, or None."""

    @cached_property
    def id(self) -> str:
        """Identity by content (16 hex digits): two rows with the same turns have the same prompt, whatever
        file they came from."""
        words = [[t.role, t.content, t.calls] if t.calls else [t.role, t.content] for t in self.turns]
        text = json.dumps(words, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Completion:
    """One answer. Sampled here: ``token_ids`` (trained on as they are, never decoded and encoded again); from
    a file: ``text``."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    finished: bool = True
    """False when sampling was cut by its length limit: such a completion gets no end-of-sequence token."""
    tokenizer: str | None = field(default=None, compare=False)
    """Whose ``token_ids`` they are: ``data.chat.vocabulary_fingerprint`` of the tokenizer, None where nobody
    says."""
    behavior_logprobs: tuple[float, ...] | None = field(default=None, compare=False)
    """log mu of each of ``token_ids`` under the policy that wrote them, nats, at ``behavior_temperature`` and
    without truncation; nan where it is not known. None: known of no token."""
    behavior_temperature: float = field(default=1.0, compare=False)
    """What the logits behind ``behavior_logprobs`` were divided by."""
    loss_mask: tuple[bool, ...] | None = None
    """Which of ``token_ids`` the policy wrote: the others (a tool's results, a user's turns) are context.
    None: all."""
    token_rewards: tuple[float, ...] | None = field(default=None, compare=False)
    """What each of ``token_ids`` is worth, read with ``loss.advantage=tokens``; None: nobody says."""
    turns: tuple[Turn, ...] = ()
    """The turns that ``text`` is made of, the policy's and those of who answered it, the policy's last one at
    the end. Empty for a single answer."""


@dataclass(frozen=True)
class Group:
    """One prompt, its completions and their rewards: one line of a groups file, the one record between
    sources and trainers.

    An offline pair is a group of two with rewards (1.0, -1.0), chosen first. An unpaired example is a group
    of one whose reward is 1.0 (desirable) or -1.0 (undesirable). A demonstration is a group of one with
    reward 1.0. A prompt alone has no completion.
    """

    prompt: Prompt
    completions: tuple[Completion, ...] = ()
    rewards: tuple[float, ...] = ()
    place: str = field(default="", compare=False)
    """The file and the row of a group with token ids, for messages: which tokenizer will read them is known
    only later."""

    def __post_init__(self) -> None:
        if len(self.completions) != len(self.rewards):
            raise DataError(
                f"a group has {len(self.completions)} completions but {len(self.rewards)} rewards"
            )


@dataclass(frozen=True, eq=False)
class Sequence:
    """One tokenised row. Every token of ``completion_ids`` that ``loss_mask`` leaves is predicted and counts;
    no token of ``prompt_ids`` does."""

    prompt_ids: np.ndarray
    """[P] int32, P >= 1"""
    completion_ids: np.ndarray
    """[C] int32, C >= 1; ends with the end-of-sequence token unless sampling was cut. C = 0 only in the rows
    that fill a batch up."""
    behavior_logprobs: np.ndarray | None = None
    """[C] float32, nats: see ``Completion.behavior_logprobs``. No part of the row's identity."""
    loss_mask: np.ndarray | None = None
    """[C] bool: the tokens that count; None: all of them"""
    token_rewards: np.ndarray | None = None
    """[C] float32: see ``Completion.token_rewards``. No part of the row's identity."""

    @cached_property
    def key(self) -> str:
        """Identity by content of (prompt tokens, completion tokens, which of them count), 32 hex digits: what
        a stored log-probability belongs to."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(len(self.prompt_ids).to_bytes(8, "little"))
        digest.update(self.prompt_ids.tobytes())
        digest.update(self.completion_ids.tobytes())
        if self.loss_mask is not None:
            digest.update(b"mask" + self.loss_mask.tobytes())
        return digest.hexdigest()

    @cached_property
    def counted(self) -> np.ndarray:
        """[n] the places in ``completion_ids`` of the tokens that count, in order."""
        mask = self.loss_mask
        return np.arange(len(self.completion_ids)) if mask is None else np.flatnonzero(mask)

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True, eq=False)
class Example:
    """One unit of a loss: a pair (rows = chosen, rejected), or one sequence with its label."""

    prompt_id: str
    rows: tuple[Sequence, ...]
    label: float = 0.0
    """Unpaired: +1 desirable, -1 undesirable. GRPO: the advantage, computed once when the group was made.
    Pairs: not read."""
    mismatched: Sequence | None = None
    """KTO: this prompt with the completion of another prompt of the same global batch (eq. 7's z0)."""
    sampled_step: int | None = None
    """Online: the optimizer step whose policy sampled the completions."""


@dataclass(frozen=True)
class PackedRows:
    """Which tokens of packed rows are computed for which row. A row whose prompt another row of the
    microbatch has too may leave it to that one: then its own tokens are its completion."""

    own: tuple[int, ...]
    """How many tokens are each row's own"""
    prompts: tuple[tuple[int, int], ...]
    """(first, count) of the tokens that each row reads before its own: its prompt, which is another row's; a
    count of 0 where the prompt is its own"""

    @property
    def shares(self) -> bool:
        """Whether any row leaves its prompt to another."""
        return any(count for _, count in self.prompts)


@dataclass(eq=False)
class Sequences:
    """R rows as a device computes them: a right-padded grid [B, L] with B = R, or all rows packed into one,
    [1, N]."""

    rows: tuple[Sequence, ...]
    input_ids: torch.Tensor
    """[B, L] int64"""
    position_ids: torch.Tensor | None
    """[B, L] int64, restarting at each packed row; None for a grid: right padding needs none."""
    predict: torch.Tensor
    """[M] int64: the flat positions of [B, L] whose hidden state predicts a completion token"""
    targets: torch.Tensor
    """[M] int64: the token predicted there"""
    cells: torch.Tensor
    """[M] int64: where each goes in the flattened [R, T]"""
    mask: torch.Tensor
    """[R, T] bool: the only source of "does this token count" """
    behavior_logprobs: torch.Tensor | None = None
    """[R, T] float32, nats: log mu of the behaviour policy, nan where it is not known; None: known of no
    token"""
    packed: PackedRows | None = None
    """Whose tokens are whose where rows are packed; None for a grid"""
    token_rewards: torch.Tensor | None = None
    """[R, T] float32: ``Sequence.token_rewards``, 0 where there is none; None: of no row"""


@dataclass(eq=False)
class Microbatch:
    """What one rank runs forward and backward on at once. Rows of pairs stand chosen first: rows[:n], then
    rejected: rows[n:]."""

    examples: tuple[Example, ...]
    sequences: Sequences
    labels: torch.Tensor
    """[examples] float32: Example.label"""
    mismatched: Sequences | None = None
