"""The records that the whole code base passes around: what a person wrote (Prompt, Completion, Group), its
tokens (Sequence, Example) and what a device computes on (Sequences, Microbatch).

``Source -> Group -> Example -> Microbatch -> TokenScores -> LossResult -> step``: nothing after the source
knows whether the data were sampled from the policy a minute ago or published last year. This makes the
paper's comparison a controlled one.

Shapes: R rows (sequences); T completion positions (padded to the longest completion of the microbatch; tokens
that do not count have none); B x L the padded token grid (or 1 x N when rows are packed); M completion tokens
in all.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from common.errors import DataError
from data.json_values import whole

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Turn:
    """One message of a conversation. ``role`` is ``system``, ``user``, ``assistant`` or ``tool``."""

    role: str
    content: str
    keys: str = ""
    """The message's other keys that chat templates read, as JSON (``data.tool_calls``); "" if it has none."""

    @property
    def calls(self) -> bool:
        """Whether the message calls tools."""
        return '"tool_calls": ' in self.keys  # a quote within a text is escaped

    @property
    def message(self) -> dict[str, Any]:
        """The message as chat templates, files and reward functions use it."""
        fields: dict[str, Any] = {"role": self.role, "content": self.content}
        return fields | json.loads(self.keys) if self.keys else fields


@dataclass(frozen=True)
class Prompt:
    """What a completion answers: the conversation up to and including the last user turn, or the last tool's
    result."""

    turns: tuple[Turn, ...]
    reference_answer: str | None = None
    """The reference answer that a verifier compares with, or None."""
    tools: str = ""
    """The tools that the chat template describes to the model, as the JSON of a list; "" for none."""
    columns: str = ""
    """The row's other columns, as a JSON object, which reward functions get; "" if none are kept."""

    @cached_property
    def id(self) -> str:
        """Identity by content (16 hex digits). Two rows with the same turns have the same prompt, whichever
        file they came from."""
        words = [[t.role, t.content, t.keys] if t.keys else [t.role, t.content] for t in self.turns]
        text = json.dumps([*words, self.tools] if self.tools else words, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Completion:
    """One answer. If sampled here, it has ``token_ids``, which are trained on unchanged, never decoded and
    encoded again. If read from a file, it has ``text``."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    finished: bool = True
    """False if sampling was cut by its length limit: such a completion gets no end-of-sequence token."""
    tokenizer: str | None = field(default=None, compare=False)
    """``data.chat.vocabulary_fingerprint`` of the tokenizer that ``token_ids`` belong to; None if unknown."""
    behavior_logprobs: tuple[float, ...] | None = field(default=None, compare=False)
    """log mu of each of ``token_ids`` in nats, under the policy that wrote them, at ``behavior_temperature``
    and without truncation; nan if unknown. None: unknown for every token."""
    behavior_temperature: float = field(default=1.0, compare=False)
    """Temperature by which the logits of ``behavior_logprobs`` were divided."""
    loss_mask: tuple[bool, ...] | None = None
    """True for each of ``token_ids`` that the policy wrote. The others (a tool's results, a user's turns) are
    context. None: the policy wrote all."""
    keys: str = ""
    """The other keys of the answer's message, as in ``Turn.keys``: what was thought before it."""
    stopped: str = ""
    """The string of ``sampler.stop`` that ended it: it gets no end-of-sequence token, and ``text`` ends
    before the string, which ``token_ids`` hold."""

    @property
    def turn(self) -> Turn:
        """``text`` as the turn that a chat template writes."""
        return Turn("assistant", self.text or "", self.keys)


@dataclass(frozen=True)
class Group:
    """One prompt, its completions and their rewards. It is one line of a groups file, and the record that
    connects sources and trainers.

    An offline pair is a group of two with rewards (1.0, -1.0), chosen first. An unpaired example is a group
    of one whose reward is 1.0 (desirable) or -1.0 (undesirable). A demonstration is a group of one with
    reward 1.0. A prompt alone has no completion.
    """

    prompt: Prompt
    completions: tuple[Completion, ...] = ()
    rewards: tuple[float, ...] = ()
    numbers: tuple[float, ...] = ()
    """The row's values of the columns ``data.numbers``, in that order."""
    place: str = field(default="", compare=False)
    """The file and row of the group, for messages, because tokenizer and template are known only later; "" if
    it was not read as a row of its own."""

    def __post_init__(self) -> None:
        if len(self.completions) != len(self.rewards):
            counts = f"{len(self.completions)} completions but {len(self.rewards)} rewards"
            raise DataError(f"a group has {counts}")


@dataclass(frozen=True, eq=False)
class Sequence:
    """One tokenised row. Every token of ``completion_ids`` that ``loss_mask`` selects is predicted and
    counts; no token of ``prompt_ids`` does."""

    prompt_ids: np.ndarray
    """[P] int32, P >= 1"""
    completion_ids: np.ndarray
    """[C] int32, C >= 1; ends with the end-of-sequence token unless sampling was cut. C = 0 only in rows that
    fill up a batch."""
    behavior_logprobs: np.ndarray | None = None
    """[C] float32, nats: see ``Completion.behavior_logprobs``. Not part of the row's identity."""
    loss_mask: np.ndarray | None = None
    """[C] bool: the tokens that count; None: all of them"""

    @cached_property
    def key(self) -> str:
        """Identity by content of (prompt tokens, completion tokens, which of them count), 32 hex digits. A
        stored log-probability is filed under it."""
        digest = hashlib.blake2b(len(self.prompt_ids).to_bytes(8, "little"), digest_size=16)
        digest.update(self.prompt_ids.tobytes())
        digest.update(self.completion_ids.tobytes())
        if self.loss_mask is not None:
            digest.update(b"mask" + self.loss_mask.tobytes())
        return digest.hexdigest()

    @cached_property
    def counted(self) -> np.ndarray:
        """[n] the positions in ``completion_ids`` of the tokens that count, in order."""
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
    numbers: tuple[float, ...] = ()
    """``Group.numbers``, which the loss gets by name."""


@dataclass(frozen=True)
class PackedRows:
    """The tokens that are computed for each of several packed rows. If rows of a microbatch have the same
    prompt, one may leave it to another. Then its own tokens are only its completion."""

    lengths: tuple[int, ...]
    """Number of each row's own tokens"""
    prompts: tuple[tuple[int, int], ...]
    """(first, count) of the tokens that a row reads before its own: its prompt, computed for another row. The
    count is 0 if the row computes its own prompt"""

    @property
    def shares(self) -> bool:
        """Whether any row leaves its prompt to another."""
        return any(count for _, count in self.prompts)


@dataclass(eq=False)
class Sequences:
    """R rows in the form that a device computes: a right-padded grid [B, L] with B = R, or all rows packed
    into one, [1, N]."""

    rows: tuple[Sequence, ...]
    input_ids: torch.Tensor
    """[B, L] int64"""
    position_ids: torch.Tensor | None
    """[B, L] int64, restarting at each packed row; None for a grid, because right padding needs none."""
    predict: torch.Tensor
    """[M] int64: the flat positions of [B, L] whose hidden state predicts a completion token"""
    targets: torch.Tensor
    """[M] int64: the token predicted there"""
    cells: torch.Tensor
    """[M] int64: the index of each predicted token in the flattened [R, T]"""
    mask: torch.Tensor
    """[R, T] bool: the only source of "does this token count" """
    behavior_logprobs: torch.Tensor | None = None
    """[R, T] float32, nats: log mu of the behaviour policy, nan if unknown; None: unknown for every token"""
    packed: PackedRows | None = None
    """How tokens belong to packed rows; None for a grid"""


@dataclass(eq=False)
class Microbatch:
    """The examples that one rank runs forward and backward on at once. Rows of pairs stand chosen first,
    rows[:n], then rejected, rows[n:]."""

    examples: tuple[Example, ...]
    sequences: Sequences
    labels: torch.Tensor
    """[examples] float32: Example.label"""
    mismatched: Sequences | None = None
    numbers: torch.Tensor | None = None
    """[examples, columns] float32: Example.numbers, 0 for examples that only fill up the batch; None: no
    example has any"""


# What chat templates read of a message besides role and content. Calls of tools have OpenAI's form; arguments
# that are a JSON text are parsed, because templates serialise them themselves


OF_A_RESULT = ("name", "tool_call_id")
"""Keys by which a tool's message may refer to the call that it answers."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys under which chat templates read what was thought before an assistant's content."""
THOUGHT = re.compile(
    r"(?=.*(?:reason|think|thought))((reasoning|thinking|thoughts?|content|details|text)_?)+"
)
"""Keys under which messages have it; under another than THOUGHTS it is given as the first of these."""
MARKS = ("weight", "train", "training", "trainable", "loss")
"""Keys by which a message says whether it is learned."""
READ_KEYS = {"role", "content", "from", "value", "tool_calls", *OF_A_RESULT, *MARKS}


def split_system(turns: tuple[Turn, ...]) -> tuple[tuple[Turn, ...], tuple[Turn, ...]]:
    """Return (the system turn, if the conversation begins with one, the other turns)."""
    return (turns[:1], turns[1:]) if turns and turns[0].role == "system" else ((), turns)


def of_message(message: Mapping[str, Any], calling: bool = True) -> str:
    """Return a message's ``Turn.keys``. ``calling`` says whether the conversation has tool calls. Raises
    ValueError for malformed calls, and for thoughts that are no text."""
    fields = {key: message[key] for key in THOUGHTS if message.get(key)}
    if not fields and (others := [key for key in message if THOUGHT.fullmatch(key) and message[key]]):
        thought = message[others[0]]
        if isinstance(thought, list):
            thought = "\n".join(one["text"] for one in thought if isinstance(one, Mapping) and "text" in one)
        fields = {THOUGHTS[0]: thought or None}
    for key, thought in fields.items():
        if not isinstance(thought, str):
            raise ValueError(f"{key!r} is a {type(thought).__name__}, not a string")
    if calling and message.get("tool_calls"):
        if not isinstance(calls := message["tool_calls"], list):
            raise ValueError(f"'tool_calls' is a {type(calls).__name__}, not a list")
        fields["tool_calls"] = [_call(call) for call in calls]
    elif calling and message.get("role") == "tool":
        fields |= {key: message[key] for key in OF_A_RESULT if isinstance(message.get(key), str)}
    return json.dumps(fields, ensure_ascii=False, default=str) if fields else ""


def tools_of(tools: Any) -> str:
    """Return a row's ``tools``, a list of functions' JSON schemas or its JSON text, as ``Prompt.tools``.
    Raises ValueError."""
    if isinstance(tools, str) and tools.strip():
        tools = whole(tools, "'tools'")
    if not tools:
        return ""
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError("'tools' is not a list of functions' JSON schemas, or its JSON text")
    return json.dumps(tools, ensure_ascii=False, default=str)


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError("one of 'tool_calls' has no 'function' with a 'name'")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = whole(arguments, f"the arguments of a call of {function['name']}")
    if not isinstance(arguments, Mapping):
        raise ValueError(f"the arguments of a call of {function['name']} are no object")
    return dict(call) | {"function": dict(function) | {"arguments": dict(arguments)}}
