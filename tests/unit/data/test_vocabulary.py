"""Whether a tokenizer can read the data."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import AutoTokenizer

from common.errors import ConfigError
from data.vocabulary import MOST_UNKNOWN, check_vocabulary, limit_tokens, unknown_share
from tests.tiny import ROOT


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "assets" / "adder" / "model")


def ids(tokenizer, text):
    return np.array(tokenizer(text)["input_ids"], np.int32)


def test_the_share_is_of_all_rows_together(tokenizer):
    assert unknown_share(tokenizer, [ids(tokenizer, "12+34=46"), ids(tokenizer, "1;2")]) == 0
    rows = [np.full(30, tokenizer.unk_token_id), ids(tokenizer, "1")[:1].repeat(90)]
    assert unknown_share(tokenizer, rows) == 0.25
    assert unknown_share(tokenizer, []) == 0


def test_words_are_refused_and_sums_are_not(tokenizer):
    check_vocabulary(tokenizer, [ids(tokenizer, "12+34=46")], "sums")
    with pytest.raises(
        ConfigError, match=r"its tokenizer does not know .* of the tokens of words; choose a model"
    ):
        check_vocabulary(tokenizer, [ids(tokenizer, "hello")], "words")
    unknown = np.full(1, tokenizer.unk_token_id)
    few = ids(tokenizer, "1")[:1].repeat(round(1 / MOST_UNKNOWN) - 1)
    check_vocabulary(tokenizer, [unknown, few], "a tenth")


@pytest.mark.parametrize("same", ["eos_token", "bos_token", "pad_token"])
def test_a_token_that_also_means_something_else_says_nothing(tokenizer, same):
    own = AutoTokenizer.from_pretrained(ROOT / "assets" / "adder" / "model")
    own.unk_token = getattr(own, same)
    assert unknown_share(own, [np.full(5, own.unk_token_id)]) == 0
    own.unk_token = None
    assert unknown_share(own, [np.full(5, 3)]) == 0


def test_tokens_without_a_row_in_the_embedding_are_refused_where_they_are_read():
    own = AutoTokenizer.from_pretrained(ROOT / "assets" / "adder" / "model")
    known = len(own)
    own.add_special_tokens({"additional_special_tokens": ["<call>"]})
    beyond = [ids(own, "12+34=46"), ids(own, "1<call>")]
    limit_tokens(own, known + 1, [own.eos_token_id])
    check_vocabulary(own, beyond, "sums")
    limit_tokens(own, known, [own.eos_token_id])
    check_vocabulary(own, beyond[:1], "sums")
    said = rf"has {known} rows, and sums have the token '<call>', whose id is {known}: name .*resize_token"
    with pytest.raises(ConfigError, match=said):
        check_vocabulary(own, iter(beyond), "sums")
    with pytest.raises(ConfigError, match="the tokens that end an answer have the token '<call>'"):
        limit_tokens(own, known, [own.eos_token_id, known])
