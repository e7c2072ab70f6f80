"""Check that a tokenizer can read the data: it turns everything that it does not know into one and the same
token, and a model trained on that token learns nothing about the text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
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


def limit_tokens(tokenizer: PreTrainedTokenizerBase, embedding: int, stops: Iterable[int]) -> None:
    """Let ``check_vocabulary`` refuse data with tokens for which a model whose embedding has ``embedding``
    rows has none. Some published tokenizers know such tokens, and no text has them. Raises ConfigError if one
    of ``stops``, which end an answer, is among them."""
    if max(tokenizer.get_vocab().values(), default=0) >= embedding:
        setattr(tokenizer, _LIMIT, embedding)
        check_vocabulary(tokenizer, [np.array([*stops])], "the tokens that end an answer")


_LIMIT = "embedding_rows"
"""Attribute of a tokenizer that knows more tokens than its model."""


def _within(
    tokenizer: PreTrainedTokenizerBase, limit: int, rows: Iterable[np.ndarray], origin: str
) -> Iterator[np.ndarray]:
    """Yield the rows. Raises ConfigError at the first with a token of ``limit`` or more."""
    for ids in rows:
        if ids.size and (worst := int(ids.max())) >= limit:
            raise ConfigError(
                "model.name_or_path",
                tokenizer.name_or_path,
                f"its embedding has {limit} rows, and {origin} have the token "
                f"{tokenizer.convert_ids_to_tokens(worst)!r}, whose id is {worst}: name the model's own "
                "tokenizer in model.tokenizer_name_or_path, or make the embedding larger "
                "(model.resize_token_embeddings(len(tokenizer)), then save_pretrained)",
            )
        yield ids


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, rows: Iterable[np.ndarray], origin: str) -> None:
    """Raise ConfigError for data that the tokenizer cannot read, or whose tokens the model does not have
    (``limit_tokens``). ``origin`` describes the data in words."""
    if (limit := getattr(tokenizer, _LIMIT, None)) is not None:
        rows = list(_within(tokenizer, limit, rows, origin))
    share = unknown_share(tokenizer, rows)
    if share > MOST_UNKNOWN:
        raise ConfigError(
            "model.name_or_path",
            tokenizer.name_or_path,
            f"its tokenizer does not know {share:.1%} of the tokens of {origin}; choose a model that can "
            "read them, as in model=hub model.name_or_path=org/name",
        )
