"""Groups files know whose token ids they hold; the ids of another tokenizer are refused by file and row, and
what is no id is dropped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.errors import DataError
from data.chat import vocabulary_fingerprint
from data.groups import check_token_ids, from_dict, read_groups, to_dict, write_groups
from data.sources import load_groups
from data.types import Completion, Group, Prompt, Turn
from tests.tiny_tokenizers import tiny_tokenizer
from tests.unit.data.people import lines, local

OURS = "0123456789abcdef"


def group(*ids: int, tokenizer: str | None = OURS, question: str = "q") -> Group:
    sampled = Completion("a", ids, True, tokenizer)
    return Group(Prompt((Turn("user", question),)), (sampled, Completion("b")), (1.0, -1.0))


def load(path: Path) -> list[Group]:
    return load_groups(local(path, max_unreadable=1), "train").groups


def test_a_file_says_whose_ids_it_holds_and_one_that_does_not_is_as_it_was(tmp_path):
    path = tmp_path / "groups.jsonl"
    write_groups(path, [group(1, 2), group(3, tokenizer=None)])
    first, second = (json.loads(line)["completions"] for line in path.read_text().splitlines())
    assert [c.get("tokenizer") for c in first] == [OURS, None]
    assert all(c.keys() == {"text", "token_ids", "finished"} for c in (first[1], *second))
    for read in (read_groups, load):
        assert [g.completions[0].tokenizer for g in read(path)] == [OURS, None]
        assert [g.place for g in read(path)] == ["groups.jsonl, row 1", "groups.jsonl, row 2"]


def test_the_first_ids_that_are_not_the_models_are_named_with_the_remedy(tmp_path):
    path = tmp_path / "groups.jsonl"
    for ids, tokenizer, says in [
        ((0, 18), OURS, None),
        ((0, 18), None, None),
        ((0, 18), "fedcba9876543210", "another tokenizer"),
        ((4, 19), OURS, "token id 19, and the model's vocabulary has 19"),
    ]:
        write_groups(path, [group(1), group(*ids, tokenizer=tokenizer, question="r")])
        made = load(path)
        if says is None:
            check_token_ids(made, OURS, 19)
            continue
        with pytest.raises(DataError, match=f"groups.jsonl, row 2: .*{says}.*take token_ids out of the "):
            check_token_ids(made, OURS, 19)


WRONG = [
    *({"token_ids": of} for of in (5, "abc", {}, [True], [-1], [1.0], [None])),
    *({"text": 3}, {"finished": "no"}, {"tokenizer": 7}),
]


def test_what_is_no_completion_is_dropped_with_a_reason(tmp_path):
    path = tmp_path / "groups.jsonl"
    for change in WRONG:
        write_groups(path, [group(1), group(2, question="r")])
        first, second = map(json.loads, path.read_text().splitlines())
        second["completions"][0] |= change
        lines(path, [first, second])
        assert len(load(path)) == 1
        with pytest.raises(DataError, match=f"line 2: .*{next(iter(change))}"):
            read_groups(path)


def test_a_temperature_is_read_as_it_was_written():
    for at in (0.5, 1.0, 2.0):
        sampled = Completion("a", (1,), True, OURS, behavior_logprobs=(-1.0,), behavior_temperature=at)
        (again,) = from_dict(to_dict(Group(Prompt((Turn("user", "q"),)), (sampled,), (1.0,)))).completions
        assert vars(again) == vars(sampled)


def test_a_fingerprint_is_that_of_the_tokens_and_their_numbers_alone():
    one, same, more, other = (tiny_tokenizer(name) for name in ("llama3", "llama3", "llama3", "qwen2"))
    same.chat_template, same.model_max_length = "{{ messages }}", 7
    before = vocabulary_fingerprint(more)
    assert before == vocabulary_fingerprint(one) == vocabulary_fingerprint(same)
    more.add_tokens("question")
    assert len({vocabulary_fingerprint(t) for t in (one, more, other)}) == 3
