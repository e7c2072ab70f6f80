"""Texts as people bring them: with control tokens inside, and far longer than there is room for."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.chat import CONTROLLED, Renderer
from data.templates import load_template
from data.types import Completion, Prompt, Sequence, Turn
from tests.tiny_tokenizers import END_OF_TURN, tiny_tokenizer

TOKENIZERS = {family: tiny_tokenizer(family) for family in ("llama3", "qwen2", "gemma2")}


def renderer(family: str, lengths: tuple[int, int] = (512, 256), **settings: str) -> Renderer:
    tokenizer, (length, prompt_length) = TOKENIZERS[family], lengths
    template = load_template(tokenizer)
    return Renderer(
        tokenizer, max_length=length, max_prompt_length=prompt_length, template=template, **settings
    )


def asked(text: str) -> Prompt:
    return Prompt((Turn("user", text),))


def row(made: Sequence | str) -> Sequence:
    assert isinstance(made, Sequence), made
    return made


@pytest.mark.parametrize("family", TOKENIZERS)
@settings(max_examples=30)
@given(before=st.text("ab c", max_size=6), behind=st.text("ab c", max_size=6))
def test_control_tokens_are_kept_escaped_or_dropped(family, before, behind):
    tokenizer, end = TOKENIZERS[family], END_OF_TURN[family]
    text, (control,) = f"x{before}{end}{behind}x", tokenizer.convert_tokens_to_ids([end])
    plain = [row(renderer(family).sequence(asked("xx"), Completion("xx")))]
    count = [list(part).count(control) for part in (plain[0].prompt_ids, plain[0].completion_ids)]
    keep, escape = renderer(family), renderer(family, control_tokens="escape")
    kept, escaped = (row(r.sequence(asked(text), Completion(text))) for r in (keep, escape))
    for i, part in enumerate(("prompt_ids", "completion_ids")):
        assert list(getattr(kept, part)).count(control) == count[i] + 1, "as at inference"
        assert list(getattr(escaped, part)).count(control) == count[i]
        written = tokenizer.decode(getattr(escaped, part))
        assert written == tokenizer.decode(getattr(kept, part)), "the same text, told by plain tokens"
    assert keep.cuts[CONTROLLED] == escape.cuts[CONTROLLED] == 2
    assert keep.fingerprint != escape.fingerprint
    dropped = renderer(family, control_tokens="drop")
    assert "data.control_tokens=drop" in dropped.sequence(asked("x"), Completion(text))
    assert "data.control_tokens=drop" in dropped.prompts([asked(text)])[0]
    assert isinstance(dropped.sequence(asked("x"), Completion("x" + end)), Sequence), "its own end is none"


@pytest.mark.parametrize("family", TOKENIZERS)
@pytest.mark.parametrize("word", ["word ", "x", " ", "ünï→ "])
def test_a_long_text_gives_the_ids_of_the_whole_text(family, word, monkeypatch):
    cut, whole = renderer(family, (160, 96)), renderer(family, (160, 96))
    monkeypatch.setattr(whole, "_bounded", lambda text, limit, end=False: text)
    long = "the beginning " + word * 9000 + " the end?"
    prompts = [asked(long), Prompt((Turn("user", long), Turn("assistant", "a"), Turn("user", "why?")))]
    for prompt in prompts:
        found, expected = (row(r.sequence(prompt, Completion(long))) for r in (cut, whole))
        assert np.array_equal(found.prompt_ids, expected.prompt_ids)
        assert np.array_equal(found.completion_ids, expected.completion_ids)
    named = [what for what in cut.cuts if "before it was tokenised" in what]
    assert named and f"{len(long):,} characters from 'the beginning" in named[0]


def test_a_long_text_takes_little_memory():
    text = "word " * 1_000_000
    make = renderer("llama3", (64, 32))
    tracemalloc.start()
    row(make.sequence(asked(text), Completion(text)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * len(text), "hundreds of bytes a character where it is tokenised whole"


def test_long_prompts_are_counted_and_may_be_dropped():
    long, short = asked("word " * 300), asked("word")
    make = renderer("llama3")
    assert make.too_long(long) and not make.too_long(short) and not make.cuts
    make.prompts([long, short])
    assert make.cuts["last user turn"] == 1
    dropping = renderer("llama3", long_prompts="drop")
    assert [isinstance(made, str) for made in dropping.prompts([long, short])] == [True, False]
