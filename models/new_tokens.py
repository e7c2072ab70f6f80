"""Tokens that a model's tokenizer lacks (``model.new_tokens``), such as the control tokens of ``loss=csft``.

They are special tokens of the tokenizer, each with one id. The embedding and the output head get a row for
each, the mean of the rows of the tokens that were there. Unlike a draw, the mean is the same in every run,
and no new token is more likely than an average one.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import AddedToken


def add_tokens(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[str]:
    """Add the texts that the tokenizer does not have as one token, and return them."""
    if not texts:
        return []  # a vocabulary is a large dictionary to ask for
    vocabulary = tokenizer.get_vocab()
    new = [text for text in texts if text not in vocabulary]
    tokenizer.add_tokens(
        [AddedToken(text, special=True, normalized=False) for text in new], special_tokens=True
    )
    return new


def with_rows(hf_config: PretrainedConfig, rows: int) -> PretrainedConfig:
    """Return the config with this many rows in the embedding."""
    resized: PretrainedConfig = copy.deepcopy(hf_config)
    resized.get_text_config().vocab_size = rows
    return resized


def rows_for(hf_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return how many rows the embedding needs. Many have more than their tokenizer has tokens."""
    return max(hf_config.get_text_config().vocab_size, len(tokenizer))


@torch.no_grad()
def grow(model: PreTrainedModel, rows: int, new: Sequence[int]) -> None:
    """Give the embedding and the head ``rows`` rows, and those of the ids ``new`` the mean of the rows before
    the first of them."""
    if not new:
        return
    embedding: Any = model.get_input_embeddings()
    if rows > embedding.weight.shape[0]:
        model.resize_token_embeddings(rows, mean_resizing=False)
    for end in (model.get_input_embeddings(), model.get_output_embeddings()):
        for values in end.parameters(recurse=False) if isinstance(end, nn.Module) else ():
            values[list(new)] = values[: min(new)].float().mean(0).to(values.dtype)
