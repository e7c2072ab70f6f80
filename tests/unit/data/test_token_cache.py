"""Token ids on disk: a second start makes the same examples and the same report without the tokenizer,
nothing stale is read, and what is made when it is asked for is what would be held."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import StoppedError
from data import token_cache, views
from data.balance import share_tokens
from data.chat import Renderer
from data.examples import (
    Examples,
    columns_of,
    groups_digest,
    longest,
    make_examples,
    picked_groups,
    prompts_digest,
    with_tokens,
)
from data.templates import load_template
from data.token_cache import TokenCache
from data.types import Completion, Example, Group, Prompt, Turn
from data.views import ExampleSpec
from tests.tiny import random_groups
from tests.tiny_tokenizers import tiny_tokenizer

TOKENIZERS = {name: tiny_tokenizer("llama3") for name in ("llama3", "one token more")}
TOKENIZERS["one token more"].add_tokens("question")


def renderer(name: str = "llama3", template: str | None = None, **lengths: int) -> Renderer:
    tokenizer, limits = TOKENIZERS[name], {"max_length": 70, "max_prompt_length": 50} | lengths
    return Renderer(tokenizer, **limits, template=template or load_template(tokenizer))


def groups(n: int = 30) -> list[Group]:
    """Pairs of which some lose turns, the beginning of a turn or an end, some cannot be tokenised, and some
    were sampled."""
    made = []
    for i in range(n):
        first, last = f"question {i} " + "the one " * (i % 4), "the " * (i % 9 * 8)
        turns = [Turn("user", first), Turn("assistant", "there " * 4), Turn("user", last)]
        system = [Turn("system", "endless " * 40)] if i % 7 == 3 else []
        ids = tuple(range(5, 9 + i % 5))
        known = (-0.5,) * len(ids) if i % 4 == 1 else None
        mask = (i % 8 == 2, *(True,) * (len(ids) - 1)) if i % 4 == 2 else None
        sampled = Completion(None, ids, i % 2 == 0, behavior_logprobs=known, loss_mask=mask)
        answers = Completion("yes " * (1 + i % 8)), sampled
        made.append(Group(Prompt((*system, *turns[:: 1 + i % 2])), answers, (1.0, -1.0)))
    return made


def plain(made: Any) -> list[object]:
    """Everything that examples or their groups say, comparable."""

    def values(array: np.ndarray | None) -> object:
        return None if array is None else (array.dtype.str, array.tolist())

    def row(of: Any) -> object:
        extras = (of.behavior_logprobs, of.loss_mask)
        return (values(of.prompt_ids), values(of.completion_ids), repr([values(a) for a in extras]), of.key)

    return [
        [(e.prompt_id, e.label, [row(r) for r in e.rows]) for e in group]
        for group in getattr(made, "groups", made)
    ]


def start(cache: TokenCache, of: Renderer | None = None, tokenises: bool = True) -> tuple[Examples, Renderer]:
    of = of or renderer()
    if not tokenises:
        of.sequences = None  # type: ignore[assignment,method-assign]
    return make_examples(groups(), views.pairs, of, cache), of


@pytest.fixture
def cache(tmp_path: Path) -> TokenCache:
    return TokenCache(tmp_path, worth=1)


@pytest.fixture
def entry(cache: TokenCache) -> Path:
    start(cache)
    [path] = cache.folder.iterdir()
    return path


def test_the_second_start_makes_the_same_examples_and_counts_without_the_tokenizer(cache):
    direct = renderer()
    want = make_examples(groups(), views.pairs, direct)
    assert len(want.groups) > 15 and len(want.dropped) == 1
    assert set(direct.cuts) == {"oldest turns", "last user turn", "completion end"}
    for tokenises in (True, False):
        made, of = start(cache, tokenises=tokenises)
        assert plain(made) == plain(want) and made.dropped == want.dropped
        assert of.cuts == direct.cuts
    chosen, rejected = made.groups[0][0].rows
    assert np.shares_memory(chosen.prompt_ids, rejected.prompt_ids), "a pair's prompt is held once"


def test_losses_that_want_the_same_rows_share_an_entry_and_a_few_rows_have_none(tmp_path, cache, entry):
    """An entry may be of reasons alone."""
    of = renderer()
    of.sequences = None
    assert make_examples(groups(), views.labelled, of, cache).count == 2 * start(cache)[0].count
    assert list(cache.folder.iterdir()) == [entry]
    start(TokenCache(tmp_path / "new", write=False, worth=1))  # as a dry run's
    start(TokenCache(tmp_path / "new", worth=61))
    assert not (tmp_path / "new").exists()
    hopeless = Prompt((Turn("system", "endless " * 80), Turn("user", "a")))
    for _ in range(2):
        found = make_examples([Group(hopeless, (Completion("b"),), (1.0,))], every, renderer(), cache)
        assert found.count == 0 and "max_prompt_length" in next(iter(found.dropped))


def every(group: Group) -> list[ExampleSpec]:
    return [ExampleSpec(tuple(range(len(group.completions))))]


def others() -> Iterator[tuple[Renderer, list[Group]]]:
    """Renderers and groups, each with one thing that is another."""
    first, *rest = groups()[8:]
    text, sampled = first.completions
    role = Turn("system", first.prompt.turns[0].content)
    yield renderer(), [replace(first, prompt=Prompt((role, *first.prompt.turns[1:]))), *rest]
    for change in ({"text": "x"}, {"finished": False}):
        yield renderer(), [replace(first, completions=(replace(text, **change), sampled)), *rest]
    for change in ({"token_ids": (5, 4)}, {"behavior_logprobs": (-0.5,) * 7}):
        yield renderer(), [replace(first, completions=(text, replace(sampled, **change))), *rest]
    yield renderer(), [first, *rest][::-1]
    yield renderer("one token more"), [first, *rest]
    yield renderer(template=load_template(TOKENIZERS["llama3"]) + " "), [first, *rest]
    yield renderer(max_length=71), [first, *rest]
    yield renderer(max_prompt_length=49), [first, *rest]


def test_what_the_ids_depend_on_is_in_the_key(cache):
    """Where a row and a group end, too: rows whose words run together into the same text, and two rows in one
    group or in two."""
    make_examples(groups()[8:], every, renderer(), cache)
    for number, (of, changed) in enumerate(others(), 2):
        made, direct = (make_examples(changed, every, of, place) for place in (cache, None))
        assert plain(made) == plain(direct) and made.dropped == direct.dropped
        assert len(list(cache.folder.iterdir())) == number
    prompt = groups()[0].prompt
    for answers in ([("a\nb",), ("c",)], [("a",), ("b\nc",)], [("a", "b\nc")]):
        joined = [Group(prompt, tuple(map(Completion, of)), (1.0,) * len(of)) for of in answers]
        make_examples(joined, every, renderer(), cache)
    assert len(list(cache.folder.iterdir())) == number + 3


def test_a_damaged_entry_is_said_once_and_made_again(cache, entry, capsys):
    """Cut, empty, of other rows, or with any bit changed."""
    good, want = entry.read_bytes(), plain(make_examples(groups(), views.pairs, other := renderer()))
    make_examples(groups()[1:], views.pairs, renderer(), cache)
    (foreign,) = {*cache.folder.iterdir()} - {entry}
    places = [*range(0, len(good), 997), *range(len(good) - 24, len(good), 5)]
    flipped = (good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in places)
    for number, damaged in enumerate([foreign.read_bytes(), good[:-40], b"", *flipped]):
        entry.write_bytes(damaged)
        found, of = start(cache)
        assert plain(found) == want and of.cuts == other.cuts
        assert capsys.readouterr().out.count("damaged or foreign") == 1, number
        assert entry.read_bytes() == good


@pytest.mark.parametrize("how", ["cut", "one bit"])
def test_an_entry_that_changes_while_it_is_read_ends_the_run_and_names_the_file(
    cache, entry, monkeypatch, how
):
    """In place, as ``cp`` over it does; a mapped file would end the process with SIGBUS."""
    monkeypatch.setattr(token_cache, "_HELD", 0)
    read, _ = start(cache, tokenises=False)
    good = entry.read_bytes()
    at = good.index(np.ascontiguousarray(read.groups[3][0].rows[0].completion_ids).tobytes())
    with entry.open("r+b") as file:
        file.seek(at)
        file.truncate() if how == "cut" else file.write(bytes([good[at] ^ 1]))
    with pytest.raises(StoppedError, match=f"{entry}.*resume=true"):
        plain(read)


def test_many_starts_at_once_leave_one_sound_entry(cache, capsys):
    with ThreadPoolExecutor(8) as pool:
        every = list(pool.map(lambda _: start(cache)[0], range(8)))
    assert all(plain(one) == plain(every[0]) for one in every)
    assert [path.suffix for path in cache.folder.iterdir()] == [".arrow"]
    start(cache, tokenises=False)
    assert capsys.readouterr().out == ""


# Examples from a file and from memory, and their digests


REWARDS = ((1.0, -1.0), (0.0, 0.5), (1.0, 1.0), (0.0,), (1.0,), ())


def varied() -> list[Group]:
    """Groups of two, one and no answer, of different and of equal rewards."""
    pairs = zip(groups(48), itertools.cycle(REWARDS), strict=False)
    return [replace(of, completions=of.completions[: len(to)], rewards=to) for of, to in pairs]


def same(made: Examples, want: Examples) -> None:
    assert list(made.dropped.items()) == list(want.dropped.items())
    assert plain(made.groups) == plain(want.groups) and len(made.groups) == len(want.groups)
    assert made.count == want.count == sum(map(len, want.groups))
    ours, theirs = columns_of(made.groups), columns_of(want.groups)
    for name, values in vars(theirs).items():
        assert getattr(ours, name).tolist() == values.tolist(), name
    assert ours.signs.tolist() == theirs.signs.tolist()
    for packed in (True, False) if want.groups else ():
        most = longest(made.groups, packed)
        assert plain([[most]]) == plain([[longest(want.groups, packed)]])
        shares = [share_tokens([example], packed) for group in want.groups for example in group]
        assert share_tokens([most], packed) == max(shares)


@pytest.mark.parametrize("view", [views.pairs, views.labelled, views.group_advantages, views.demonstrations])
def test_a_table_gives_what_would_be_held(tmp_path, view):
    """Held are the rows of each group as they are tokenised one by one; why others have none is counted."""
    wanted = varied()
    want, of = make_examples(wanted, view, renderer()), renderer()
    held = []
    for group in wanted:
        answers = [group.completions[i] for spec in view(group) for i in spec.completions]
        rows = [with_tokens(of.sequence(group.prompt, answer), answer) for answer in answers]
        if rows and not any(isinstance(row, str) for row in rows):
            held.append(Example("", tuple(rows)))
    found = [Example("", tuple(row for e in group for row in e.rows)) for group in want.groups]
    assert plain([found]) == plain([held])
    assert len(want.groups) + sum(want.dropped.values()) == len(wanted)
    cache = TokenCache(tmp_path, worth=1)
    for made in (make_examples(wanted, view, renderer(), cache) for _ in range(2)):  # written, then read
        same(made, want)
    assert groups_digest(made.groups) == groups_digest(want.groups), "wherever the rows are"
    order = np.random.default_rng(len(wanted)).permutation(len(want.groups))
    assert plain(picked_groups(made.groups, order)) == plain([want.groups[i] for i in order])
    assert plain(made.groups[1:]) == plain(want.groups[1:])


# Digests change with whatever a run would train on otherwise, and with nothing else


def changed(example: Example) -> list[Example]:
    """The example with another token of a prompt, of a completion, a token less, one from the prompt to the
    completion, other tokens that count, another label."""
    row = example.rows[0]
    more = np.concatenate([row.prompt_ids[-1:], row.completion_ids])
    changes: list[dict[str, np.ndarray]] = [
        {"prompt_ids": row.prompt_ids + (np.arange(len(row.prompt_ids)) == 0)},
        {"completion_ids": row.completion_ids + 1},
        {"completion_ids": row.completion_ids[:-1]},
        {"prompt_ids": row.prompt_ids[:-1], "completion_ids": more},
        {"loss_mask": np.zeros(len(row.completion_ids), bool)},
    ]
    others = [replace(example, rows=(replace(row, **change), *example.rows[1:])) for change in changes]
    return [*others, replace(example, label=-example.label)]


def test_what_a_run_would_train_on_changes_the_digest() -> None:
    """One example, the order, the number and the bounds of groups; prompts with their reference answers."""
    groups = random_groups(9, seed=1, kind="labelled")
    joined = (groups[0] + groups[1], *groups[2:])
    others = [groups[::-1], groups[:-1], (*groups, groups[-1]), joined]
    others += [(*groups[:4], (one, *groups[4][1:]), *groups[5:]) for one in changed(groups[4][0])]
    assert len({groups_digest(other) for other in (groups, *others)}) == 1 + len(others)
    assert groups_digest(groups) == groups_digest(random_groups(9, seed=1, kind="labelled"))
    prompts = [Prompt((Turn("user", f"{n}+1="),), str(n)) for n in range(4)]
    others = [prompts[::-1], prompts[:3], [*prompts[:3], replace(prompts[3], reference_answer=None)]]
    assert len({prompts_digest(other) for other in (prompts, *others)}) == 4
