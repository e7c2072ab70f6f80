"""Whether a tokenizer can read the data at all: what it does not know it makes one and the same token, and a
model that is trained on that token learns nothing of the text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from common.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_UNKNOWN = 0.1
"""The share of unknown tokens from which on data are refused: texts in a language that the tokenizer was made
for have next to none."""


def unknown_share(tokenizer: PreTrainedTokenizerBase, rows: Iterable[np.ndarray]) -> float:
    """The share of the tokens of ``rows`` ([tokens] ids each) that stand for what the tokenizer does not
    know; 0 where it has no token of its own for that."""
    unknown = tokenizer.unk_token_id
    if unknown is None:
        return 0.0
    if unknown in (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id):
        return 0.0
    count = total = 0
    for ids in rows:
        count, total = count + int((ids == unknown).sum()), total + ids.size
    return count / total if total else 0.0


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, rows: Iterable[np.ndarray], origin: str) -> None:
    """Raise ConfigError for data that the tokenizer cannot read. ``origin``: which, in words."""
    share = unknown_share(tokenizer, rows)
    if share > MOST_UNKNOWN:
        raise ConfigError(
            "model.name_or_path",
            tokenizer.name_or_path,
            f"its tokenizer does not know {share:.1%} of the tokens of {origin}; choose a model that can "
            "read them, as in model=hub model.name_or_path=org/name",
        )
