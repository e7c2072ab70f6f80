"""Control tokens in the texts of people, such as an end of turn within a question.

A tokenizer makes the control token itself of such a text, in training as at inference. So a text can close
its turn and open another. ``data.control_tokens`` says what is done with them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from data.templates import RenderError, is_thought

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEEP, ESCAPE, DROP = "keep", "escape", "drop"
_PLACE = re.compile("\ue000([0-9]+)\ue001")
"""Stands for a control token that is to be encoded as plain text (characters of Unicode's private use)."""

Encode = Callable[[list[str]], list[list[int]]]


class ControlTokens:
    """The control tokens of a tokenizer: those that it marks as special, but for the tags of thoughts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, how: str = KEEP) -> None:
        """``how``: ``keep``, ``escape`` or ``drop``."""
        self.tokenizer, self.how = tokenizer, how
        tokens = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._tokens = sorted((t for t in tokens if t.strip() and not is_thought(t)), key=len, reverse=True)
        self._starts = {token[:2] for token in self._tokens}
        self._pattern = re.compile("|".join(map(re.escape, self._tokens)) or r"(?!)")

    def first(self, text: str) -> str | None:
        """Return the first control token in a text; None without one."""
        if not any(start in text for start in self._starts):
            return None
        match = self._pattern.search(text)
        return None if match is None else match[0]

    def written(self, text: str) -> str:
        """Return the text as it goes into the template. Raises RenderError for a text that is dropped."""
        token = self.first(text) if self.how != KEEP else None
        if token is None:
            return text
        if self.how == DROP:
            raise RenderError(f"a text holds the control token {token} (data.control_tokens=drop)")
        if "\ue000" in text:
            raise RenderError("a text with control tokens holds U+E000, which stands for one of them")
        return self._pattern.sub(lambda match: f"\ue000{self._tokens.index(match[0])}\ue001", text)

    def encoded(self, text: str, alone: Encode, inside: Encode) -> list[int]:
        """Return the ids of a text that ``written`` made, with its control tokens as plain text. ``alone``
        encodes the beginning of a text, ``inside`` what continues one."""
        first, *parts = _PLACE.split(text)
        ids = alone([first])[0] if first else []
        for which, behind in zip(parts[::2], parts[1::2], strict=True):
            ids += self._plain(self._tokens[int(which)]) + (inside([behind])[0] if behind else [])
        return ids

    def _plain(self, token: str) -> list[int]:
        ids: list[int] = self.tokenizer(token, add_special_tokens=False, split_special_tokens=True)[
            "input_ids"
        ]
        return ids

    @staticmethod
    def whole(text: str) -> str:
        """Return a text that was cut at its beginning, without the rest of a place that was cut through."""
        before, end, behind = text.partition("\ue001")
        return behind if end and "\ue000" not in before else text

    @staticmethod
    def in_text(text: str) -> bool:
        """Whether ``written`` has put a control token's place into the text."""
        return "\ue000" in text and _PLACE.search(text) is not None
