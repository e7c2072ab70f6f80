"""Check that a tokenizer can read the data: it turns everything that it does not know into one and the same
token, and a model trained on that token learns nothing about the text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from common.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_UNKNOWN = 0.1
"""Share of unknown tokens above which data are refused. Texts in a language that the tokenizer was made for
have almost none."""
_AT_ONCE = 4096
"""Rows that are counted at once."""


def unknown_share(tokenizer: PreTrainedTokenizerBase, rows: Iterable[np.ndarray]) -> float:
    """Return the share of the tokens of ``rows`` ([tokens] ids each) that stand for unknown text; 0 if the
    tokenizer has no separate token for it."""
    unknown = tokenizer.unk_token_id
    if unknown is None:
        return 0.0
    if unknown in (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id):
        return 0.0
    count = total = 0
    left = iter(rows)
    while part := list(itertools.islice(left, _AT_ONCE)):
        ids = np.concatenate(part)
        count, total = count + int(np.count_nonzero(ids == unknown)), total + ids.size
    return count / total if total else 0.0


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, rows: Iterable[np.ndarray], origin: str) -> None:
    """Raise ConfigError for data that the tokenizer cannot read. ``origin`` describes the data in words."""
    share = unknown_share(tokenizer, rows)
    if share > MOST_UNKNOWN:
        raise ConfigError(
            "model.name_or_path",
            tokenizer.name_or_path,
            f"its tokenizer does not know {share:.1%} of the tokens of {origin}; choose a model that can "
            "read them, as in model=hub model.name_or_path=org/name",
        )
