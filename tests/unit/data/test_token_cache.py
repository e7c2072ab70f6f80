"""Token ids on disk: a second start makes the same examples and the same report without the tokenizer, and
nothing stale is read."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from data import views
from data.chat import Renderer
from data.examples import Examples, make_examples
from data.quality import DataReport
from data.rows import Loaded
from data.templates import load_template
from data.token_cache import TokenCache, content_key
from data.token_rows import read_rows, write_rows
from data.types import Completion, Group, Prompt, Sequence, Turn
from tests.tiny_tokenizers import tiny_tokenizer

TOKENIZERS = {name: tiny_tokenizer("llama3") for name in ("llama3", "one token more")}
TOKENIZERS["one token more"].add_tokens("question")
LENGTHS = {"max_length": 70, "max_prompt_length": 50}


def renderer(name: str = "llama3", template: str | None = None, **lengths: int) -> Renderer:
    tokenizer = TOKENIZERS[name]
    return Renderer(tokenizer, **(LENGTHS | lengths), template=template or load_template(tokenizer))


def groups(n: int = 30) -> list[Group]:
    """Pairs of which some lose turns, the beginning of a turn or an end, some cannot be tokenised, and some
    were sampled."""
    made = []
    for i in range(n):
        turns = [
            Turn("user", f"question {i} " + "the one " * (i % 4)),
            Turn("assistant", "there " * 4),
            Turn("user", "the " * (i % 9 * 8)),
        ]
        system = [Turn("system", "endless " * 40)] if i % 7 == 3 else []
        sampled = Completion(token_ids=tuple(range(5, 9 + i % 5)), finished=i % 2 == 0)
        made.append(
            Group(
                Prompt((*system, *turns[:: 1 + i % 2])),
                (Completion("yes " * (1 + i % 8)), sampled),
                (1.0, -1.0),
            )
        )
    return made


def report(made: Examples, of: Renderer) -> dict[str, object]:
    return DataReport.of(
        Loaded(groups(), read=30, origin="here"), Loaded([], read=0), made, dict(of.cuts)
    ).to_dict()


def plain(made: Examples) -> list[object]:
    """Everything that an example says, comparable."""
    return [
        [
            (
                e.prompt_id,
                e.label,
                [(r.key, r.prompt_ids.dtype, r.completion_ids.dtype, r.prompt_ids.tolist()) for r in e.rows],
            )
            for e in group
        ]
        for group in made.groups
    ]


def never(*_: object) -> list[object]:
    raise AssertionError("the second start tokenised")


def start(cache: TokenCache, of: Renderer | None = None, tokenises: bool = True) -> tuple[Examples, Renderer]:
    of = of or renderer()
    if not tokenises:
        of.sequences = never  # type: ignore[assignment,method-assign]
    return make_examples(groups(), views.pairs, of, cache), of


@pytest.fixture
def cache(tmp_path: Path) -> TokenCache:
    return TokenCache(tmp_path, worth=1)


@pytest.fixture
def entry(cache: TokenCache) -> Path:
    start(cache)
    [path] = cache.folder.iterdir()
    return path


def test_the_second_start_makes_the_same_examples_and_the_same_report_without_the_tokenizer(cache):
    direct = renderer()
    want = make_examples(groups(), views.pairs, direct)
    assert (
        len(want.groups) > 15
        and len(want.dropped) == 1
        and set(direct.cuts) == {"oldest turns", "last user turn", "completion end"}
    )
    for tokenises in (True, False):
        made, of = start(cache, tokenises=tokenises)
        assert plain(made) == plain(want) and made.dropped == want.dropped
        assert report(made, of) == report(want, direct)
    chosen, rejected = made.groups[0][0].rows
    assert np.shares_memory(chosen.prompt_ids, rejected.prompt_ids), "a pair's prompt is held once"


def test_losses_that_want_the_same_rows_share_an_entry(cache, entry):
    of = renderer()
    of.sequences = never
    assert make_examples(groups(), views.labelled, of, cache).count == 2 * start(cache)[0].count
    assert list(cache.folder.iterdir()) == [entry]


def rows(of: list[Group] | None = None) -> list[tuple[Prompt, Completion]]:
    return [(group.prompt, completion) for group in of or groups() for completion in group.completions]


def changed(
    i: int, change: Callable[[Prompt, Completion], tuple[Prompt, Completion]]
) -> list[tuple[Prompt, Completion]]:
    made = rows()
    made[i] = change(*made[i])
    return made


CHANGES: dict[str, Callable[[], tuple[Renderer, list[tuple[Prompt, Completion]]]]] = {
    "a character of a completion": lambda: (
        renderer(),
        changed(10, lambda p, c: (p, replace(c, text=(c.text or "")[:-1] + "x"))),
    ),
    "a character of a prompt": lambda: (
        renderer(),
        changed(10, lambda p, c: (Prompt((*p.turns[:-1], Turn("user", "thE"))), c)),
    ),
    "a role": lambda: (
        renderer(),
        changed(10, lambda p, c: (Prompt((Turn("system", p.turns[0].content), *p.turns[1:])), c)),
    ),
    "a sampled token": lambda: (
        renderer(),
        changed(11, lambda p, c: (p, replace(c, token_ids=(*(c.token_ids or ())[:-1], 4)))),
    ),
    "an end": lambda: (renderer(), changed(10, lambda p, c: (p, replace(c, finished=False)))),
    "the order": lambda: (renderer(), rows()[::-1]),
    "one row less": lambda: (renderer(), rows()[:-1]),
    "the template": lambda: (renderer(template=load_template(TOKENIZERS["llama3"]) + " "), rows()),
    "the tokenizer": lambda: (renderer("one token more"), rows()),
    "max_length": lambda: (renderer(max_length=71), rows()),
    "max_prompt_length": lambda: (renderer(max_prompt_length=49), rows()),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_the_ids_depend_on_is_in_the_key(cache, entry, what):
    assert content_key(renderer(), rows()) == entry.stem, (
        "the same words give the same entry in every process"
    )
    of, other = CHANGES[what]()
    assert content_key(of, other) != entry.stem
    want = [r if isinstance(r, str) else r.key for r in of.sequences(other)]
    assert [r if isinstance(r, str) else r.key for r in cache.sequences(of, other)] == want
    assert len(list(cache.folder.iterdir())) == 2


def test_where_a_row_ends_is_in_the_key():
    """Two rows whose words run together into the same text."""
    prompt = rows()[0][0]
    ours, theirs = (
        [(prompt, Completion(a)), (prompt, Completion(b))] for a, b in (("a\nb", "c"), ("a", "b\nc"))
    )
    assert content_key(renderer(), ours) != content_key(renderer(), theirs)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-40]),
    "no such file format": lambda path: path.write_bytes(b"not an entry"),
    "empty": lambda path: path.write_bytes(b""),
    "one bit": flip,
    "somebody else's arrays": lambda path: save_file({"reason": np.zeros(60, np.int32)}, path),
    "without its description": lambda path: save_file(load_file(path), path),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_entry_is_said_once_and_made_again(cache, entry, capsys, what):
    good = entry.read_bytes()
    DAMAGE[what](entry)
    made, of = start(cache)
    assert plain(made) == plain(make_examples(groups(), views.pairs, renderer()))
    assert report(made, of) == report(make_examples(groups(), views.pairs, other := renderer()), other)
    assert capsys.readouterr().out.count("damaged or foreign") == 1
    assert entry.read_bytes() == good
    start(cache, tokenises=False)
    assert capsys.readouterr().out == ""


def test_the_entry_of_other_rows_under_this_name_is_not_taken(cache, entry, capsys):
    other = rows(groups(31)[1:])
    foreign = cache.folder / f"{content_key(renderer(), other)}.safetensors"
    foreign.write_bytes(entry.read_bytes())
    want = renderer().sequences(other)
    assert [getattr(r, "key", r) for r in cache.sequences(renderer(), other)] == [
        getattr(r, "key", r) for r in want
    ]
    assert "damaged or foreign" in capsys.readouterr().out


def test_many_starts_at_once_leave_one_sound_entry(cache, capsys):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: start(cache)[0], range(8)))
    assert all(plain(one) == plain(made[0]) for one in made)
    assert [path.suffix for path in cache.folder.iterdir()] == [".safetensors"]
    start(cache, tokenises=False)
    assert capsys.readouterr().out == ""


def test_a_dry_run_and_a_few_rows_write_nothing(tmp_path):
    start(TokenCache(tmp_path, write=False, worth=1))
    start(TokenCache(tmp_path, worth=61))
    assert list(tmp_path.iterdir()) == []
    start(TokenCache(tmp_path, worth=60))
    assert len(list((tmp_path / "tokens").iterdir())) == 1


def test_a_folder_that_cannot_be_written_is_said_and_hinders_nobody(tmp_path, capsys):
    (tmp_path / "tokens").write_text("a file in the way")
    made, _ = start(TokenCache(tmp_path, worth=1))
    assert plain(made) == plain(make_examples(groups(), views.pairs, renderer()))
    assert "cache_dir" in capsys.readouterr().out


@pytest.mark.parametrize("tokens", [2, 3])
def test_every_number_of_an_entry_lies_where_a_processor_can_read_it(tmp_path, tokens):
    """Also behind an odd number of tokens, which are half as wide as places."""
    row = Sequence(np.zeros(1, np.int32), np.arange(tokens - 1, dtype=np.int32))
    write_rows(tmp_path / "rows", [row, "a reason"], dict)
    found, _ = read_rows(tmp_path / "rows")
    columns = (found.tokens, found.prompt_starts, found.prompt_sizes, found.starts, found.sizes)
    assert all(column.flags.aligned for column in columns)
    assert getattr(found[0], "key", None) == row.key and found[1] == "a reason"


def test_an_entry_of_reasons_alone(cache):
    hopeless = [(Prompt((Turn("system", "endless " * 80), Turn("user", "a"))), Completion("b"))]
    for _ in range(2):
        [reason] = cache.sequences(renderer(), hopeless)
        assert isinstance(reason, str) and "max_prompt_length" in reason
