"""Files, folders, hub tables and their splits: what is read, what is refused, and that training and
evaluation share no prompt."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError, DataError, UserError
from config.schema_data import DataConfig, MixPart
from data.batches import FILL, microbatch
from data.examples import make_examples
from data.mix import mixed
from data.rows import Loaded
from data.sources import Split, hold_out, load_groups, load_splits, shards
from data.token_cache import TokenCache
from data.types import Completion, Group, Prompt, Turn
from data.views import keep_shares, labelled, pairs
from tests.tiny import make_config
from tests.unit.data.people import lines, local, words
from tests.unit.data.people import load as records
from tests.unit.data.test_token_cache import renderer

RECORDS = [{"prompt": f"ask {i}, ü", "chosen": f"good\n{i}", "rejected": f'"bad" {i}'} for i in range(40)]


def ids(loaded: Loaded) -> list[str]:
    return [group.prompt.id for group in loaded.groups]


def test_numbers_of_the_data_reach_the_microbatch(tmp_path) -> None:
    pair = {"chosen": "a", "rejected": "b"}
    rows = ({"prompt": f"p{i}", "gap": gap, **pair} for i, gap in enumerate([2, 0.5, None]))
    path = lines(tmp_path / "pairs.jsonl", rows)
    settings = {"numbers": ["margin"], "columns": {"margin": "gap"}, "max_unreadable": 1}
    loaded = load_groups(local(path, **settings), "train")
    assert [group.numbers for group in loaded.groups] == [(2.0,), (0.5,)]
    assert len(loaded.dropped) == 1 and "margin" in loaded.dropped[0].reason
    fill = dataclasses.replace(FILL, rows=FILL.rows * 2)
    for cache in (None, TokenCache(tmp_path / "cache", worth=1), TokenCache(tmp_path / "cache", worth=1)):
        (one,), (other,) = make_examples(loaded.groups, pairs, renderer(), cache).groups
        assert microbatch([one, other, fill], torch.device("cpu")).numbers.tolist() == [[2.0], [0.5], [0.0]]
    assert microbatch([FILL], torch.device("cpu")).numbers is None


CUT = gzip.compress(b'{"prompt": "a"}\n' * 99, mtime=0)[:-9]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.jsonl", None, r"data.path=.*no such file"),
        ("pairs.xml", b"a,b", "use one of .json, .jsonl"),
        ("index.csv", b",prompt\n0,a", "each once; it is .*; pandas leaves its index out with index=False"),
        ("pairs.csv", b"prompt,chosen", "holds no row"),
        ("pairs.json", b'{"prompt": 1}', "must hold one list"),
        ("pairs.json", b'{"a": 1}\n{"a": 2}', "must be named .jsonl"),
        ("pairs.json", b'[{"a": 1},\n{"a": 2', r"is not JSON \(.*: line 2 column"),
        ("pairs.json", b'[{"a": 1}\n{"a": 2}]', r"is not JSON \(.*: line 2 column"),
        ("pairs.jsonl.gz", CUT, "cannot be read to its end"),
        ("pairs.parquet", b"not parquet", "cannot be read"),
        ("pairs.jsonl", b"\n", "holds no row"),
        ("pairs.jsonl", '{"a": 1}'.encode("utf-16"), "UTF-16.*; convert it, as in iconv"),
        # a quote that is open to the end of the file, or to another
        ("a.csv", b'a,b\nq,"a\nb"\nq,"a\nr,c\ns,e\n', r"a\.csv: line 6 is not CSV .* begins at line 4;"),
        ("a.csv", b'a,b,c\nq,"a,b\nr,c,"d"\ns,e,f\n', r"a\.csv: line 3 is not CSV .* begins at line 2;"),
    ],
)
def test_a_wrong_file_is_refused_with_a_remedy(tmp_path, name: str, content: bytes | None, message: str):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load(tmp_path / name)


# Splits


def test_held_out_prompts_are_a_share_and_never_trained_on(tmp_path) -> None:
    """A system prompt does not change who is held out; nothing is where evaluation data are named."""
    doubled = RECORDS + [{**row, "chosen": "another"} for row in RECORDS]  # two pairs a prompt stay together
    settings = local(lines(tmp_path / "a.jsonl", doubled), eval_fraction=0.1)
    both = train, held_out = load_splits(settings)
    assert len(set(ids(held_out))) == 4 and len(held_out.groups) == 8
    assert not set(ids(train)) & set(ids(held_out)) and len(train.groups) == 72
    assert "4 of 40 prompts held out" in held_out.origin
    assert both == (load_groups(settings, "train"), load_groups(settings, "eval"))
    for one, bare in zip(load_splits(replace(settings, system_prompt="x")), both, strict=True):
        assert [g.prompt.turns[-1] for g in one.groups] == [g.prompt.turns[-1] for g in bare.groups]
    shuffled = random.Random(0).sample(doubled, len(doubled))
    other = lines(tmp_path / "b.jsonl", shuffled)
    assert set(ids(load_groups(replace(settings, path=str(other)), "eval"))) == set(ids(held_out))
    for named, counts in (({"eval_path": str(other)}, [80, 80]), ({"eval_fraction": 0}, [80, 0])):
        assert [len(loaded.groups) for loaded in load_splits(replace(settings, **named))] == counts
    pairs_of = load_splits(replace(settings, frac_unique_undesirable=0.0))
    assert [{len(g.rewards) for g in loaded.groups} for loaded in pairs_of] == [{1}, {2}], "of training alone"
    single = Loaded([Group(Prompt((Turn("user", "a"),)))], 1)
    assert [len(hold_out(single, 0.5, split).groups) for split in ("train", "eval")] == [1, 0]


def test_a_row_may_name_its_split(tmp_path) -> None:
    pair = {"chosen": "x", "rejected": "y"}
    records = [{**pair, "prompt": f"q{i}", "split": ("train", "test")[i % 2]} for i in range(6)]
    path = lines(tmp_path / "f.jsonl", records)
    settings, everything = local(path, eval_split="test"), local(path, ignore_columns=["split"])
    train, test = load_groups(settings, "train"), load_groups(settings, "eval")
    assert [g.prompt.turns[0].content for g in train.groups] == ["q0", "q2", "q4"]
    assert [g.prompt.turns[0].content for g in test.groups] == ["q1", "q3", "q5"]
    assert "split" not in train.unused and len(train.dropped) == 3
    assert len(load_groups(everything, "train").groups) == 6
    with pytest.raises(DataError, match=r"none of the 6 rows .*says split: 'train', not 'dev'"):
        load_groups(local(path, split="dev"), "train")
    for refused in (local(lines(tmp_path / "a.jsonl", RECORDS)), everything):
        with pytest.raises(ConfigError, match=r"data.eval_split=test: no row"):
            load_groups(replace(refused, eval_split="test"), "eval")


def made_here(settings: DataConfig, split: str) -> Loaded:
    """A source of somebody's own, as data.source may name it."""
    own = (Turn("system", "mine"), Turn("user", f"{split} 0"))
    groups = [Group(Prompt(turns), (Completion("x"),), (1.0,)) for turns in (own, own[1:])]
    return Loaded(groups, 2, origin=split)


def test_a_source_may_be_anybodys_function_and_the_system_prompt_goes_before_prompts_without() -> None:
    settings = local(None, source="tests.unit.data.test_sources.made_here", system_prompt="Be brief.")
    turns = [group.prompt.turns for group in load_groups(settings, "eval").groups]
    asked = Turn("user", "eval 0")
    assert turns == [(Turn("system", "mine"), asked), (Turn("system", "Be brief."), asked)]


# The hub (no network here: the library is given a folder, or answers as the hub would)


def test_a_hub_set_is_read_by_split_and_its_rows_too(tmp_path, monkeypatch) -> None:
    """A folder that is no clone of one is read as any folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{**row, "split": "train" if i < 30 and i % 2 else "test"} for i, row in enumerate(RECORDS)]
    for split, part in (("train", rows[:30]), ("test", rows[30:])):
        datasets.Dataset.from_list(part).to_parquet(tmp_path / "set" / f"{split}.parquet")
    settings = local(tmp_path / "set", source="data.sources.hub_table", eval_split="test")
    folder = replace(settings, subset="main", ignore_columns=["split"])
    assert [len(load_groups(folder, split).groups) for split in ("train", "eval")] == [30, 10]
    (tmp_path / "set" / "README.md").touch()
    loaded = load_groups(settings, "train")
    assert len(loaded.groups) == len(loaded.dropped) == 15 and "split" not in loaded.unused
    assert len(load_groups(settings, "eval").groups) == 10
    assert len(load_groups(replace(settings, split="train[:10]"), "train").groups) == 5
    with pytest.raises(ConfigError, match=r"data.split=validation: .*no such split"):
        load_groups(replace(settings, split="validation"), "train")


# Several sets in one by weight, and shares of desirable and undesirable examples


def test_sets_are_mixed_and_what_one_evaluates_on_none_trains_on(tmp_path):
    """The second set holds out prompts that the first would train on."""
    asked = sorted((f"q {i}" for i in range(40)), key=lambda text: Prompt((Turn("user", text),)).id)
    parts = []
    for name, weight, prompts in (("one", 1.0, asked), ("two", 3.0, asked[10:])):
        rows = ({"prompt": prompt, "chosen": name, "rejected": "bad"} for prompt in prompts)
        path = lines(tmp_path / f"{name}.jsonl", rows)
        parts.append(MixPart(name="local", weight=weight, path=str(path)))
    train, evaluation = load_splits(
        DataConfig(name="mix", source="data.mix.mixed", eval_fraction=0, mix=parts)
    )
    assert Counter(g.completions[0].text for g in train.groups) == {"one": 9, "two": 28}
    assert train.read == 70 and "9 of 36" in train.origin
    held_out = {g.prompt.id for g in evaluation.groups}
    assert held_out and held_out.isdisjoint(g.prompt.id for g in train.groups)


def test_a_part_of_a_mix_is_typed_and_what_is_none_is_refused():
    for part, key in (("{name:hh,wieght:1}", "data.mix"), ("{name:hh,weight:0}", "data.mix[0].weight")):
        with pytest.raises(ConfigError) as error:
            make_config("data=mix", f"data.mix=[{part}]")
        assert error.value.key.startswith(key)
    for name in ("hub", "mix"):
        with pytest.raises(ConfigError) as error:
            mixed(DataConfig(name="mix", source="data.mix.mixed", mix=[MixPart(name=name)]), "train")
        assert error.value.key == "data.mix.name"


@given(st.integers(1, 50), st.floats(0, 1), st.floats(0, 1))
def test_shares_of_each_label_are_kept(n, desirable, undesirable):
    answers = Completion("good"), Completion("bad")
    groups = [Group(Prompt((Turn("user", f"q {i}"),)), answers, (1.0, -1.0)) for i in range(n)]
    left = list(keep_shares(groups, desirable, undesirable))
    labels = [want.label for group in left for want in labelled(group)]
    assert (labels.count(1.0), labels.count(-1.0)) == (round(desirable * n), round(undesirable * n))
    again = keep_shares(groups[::-1], desirable, undesirable)
    assert {g.prompt.id for g in again} == {g.prompt.id for g in left}


# Folders and tables: whatever way somebody keeps the same pairs, the same groups


PAIRS = RECORDS[:12]
WHOLE = [([pair["prompt"]], [pair["chosen"], pair["rejected"]], (1.0, -1.0)) for pair in PAIRS]


def load(path: Path, split: Split = "train", **more: object) -> Loaded:
    return load_groups(local(path, **more), split)


def saved(folder: Path) -> None:
    splits = {"train": datasets.Dataset.from_list(PAIRS), "test": datasets.Dataset.from_list(PAIRS[:3])}
    datasets.DatasetDict(splits).save_to_disk(folder)


def sharded(folder: Path) -> None:
    files = {"train/0": PAIRS[:5], "train/1": PAIRS[5:], "test/0": PAIRS[:3], ".cache/old": PAIRS[:1]}
    for name, rows in files.items():
        lines(folder / f"{name}.jsonl", rows)


@pytest.mark.parametrize("made", [saved, sharded])
def test_a_folder_gives_what_a_file_gives(tmp_path, made) -> None:
    folder, path = tmp_path / "set", lines(tmp_path / "a.jsonl", PAIRS)
    made(folder)
    (folder / "README.md").write_text("about")
    loaded = load(folder)
    assert words(loaded) == WHOLE and loaded.read == 12 and loaded.format == "preference"
    splits = [[words(part) for part in load_splits(local(of, eval_fraction=0.3))] for of in (folder, path)]
    assert splits[0] == splits[1], "prompts are held out as of a file"
    assert words(load(folder, "eval", eval_split="test")) == WHOLE[:3]
    assert words(load(path, "eval", eval_path=str(folder), eval_split="test")) == WHOLE[:3]
    with pytest.raises(ConfigError, match=r"data.split=nope: .* has test, train: give one of them"):
        load_groups(local(folder, split="nope"), "train")
    if made is saved:
        hub = {"source": "data.sources.hub_table"}
        assert words(load(folder, **hub)) == WHOLE
        assert words(load(folder, "eval", eval_split="test", **hub)) == WHOLE[:3]


@pytest.mark.parametrize("suffix", ["", ".parquet"])
def test_numbers_of_classes_are_read_by_their_names(tmp_path, suffix: str) -> None:
    """``class_encode_column`` numbers names by the alphabet: 0 may be the desirable one."""
    for names in (("true", "false"), ("desirable", "undesirable")):
        rows = [{"prompt": f"q{i}", "completion": f"a{i}", "label": names[i % 2]} for i in range(4)]
        table = datasets.Dataset.from_list(rows).class_encode_column("label")
        assert table.features["label"].names == sorted(names)
        (table.to_parquet if suffix else table.save_to_disk)(tmp_path / f"{names[0]}{suffix}")
    found = [(g.prompt.turns[0].content, g.rewards) for g in load(tmp_path / f"true{suffix}").groups]
    assert found == [(f"q{i}", ((-1.0) ** i,)) for i in range(4)]
    with pytest.raises(DataError, match="'label' is 'desirable', not true or false"):
        load(tmp_path / f"desirable{suffix}")


SPLITS = {
    "train_prefs-00000-of-00001.parquet test_p-00000-of-00001.parquet": {"train_prefs": 1, "test_p": 1},
    "train-00000-of-00002-2a3ca2d4b5ca2f0b.parquet train-00001-of-00002.parquet": {"train": 2},
    "data/test-00000-of-00001.parquet dataset_infos.json data/dataset_info.json": {"test": 1},
    "pretraining.jsonl latest.csv": {"train": 2},
    "pairs.jsonl held_out.jsonl Held-Out.csv": {"train": 1, "held_out": 1, "held-out": 1},
    "README.md _notes.jsonl .hidden/a.jsonl": {},
}


@pytest.mark.parametrize(("files", "splits"), SPLITS.items())
def test_the_names_of_shards_say_their_split(tmp_path, files, splits) -> None:
    for name in files.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert {split: len(paths) for split, paths in shards(tmp_path).items()} == splits


def test_what_is_read_of_a_folder_and_what_is_wrong_with_it_is_said(tmp_path) -> None:
    for path, said in ((tmp_path, "has no file that can be read; put .json"), (None, "give the file")):
        with pytest.raises(ConfigError, match=rf"^data\.path=.*{said}"):
            load_groups(local(path), "train")
    sharded(tmp_path / "shards")
    with (tmp_path / "shards" / "train" / "1.jsonl").open("a") as stream:
        stream.write("{broken\n")
    loaded = load(tmp_path / "shards")
    assert [(d.file, d.row) for d in loaded.dropped] == [("train/1.jsonl", 8)] and words(loaded) == WHOLE
    assert loaded.origin == f"{tmp_path}/shards (train/0.jsonl, train/1.jsonl)"
    saved(broken := tmp_path / "broken")
    next(broken.rglob("train/*.arrow")).write_bytes(b"not arrow")
    with pytest.raises(DataError, match="save it again with save_to_disk"):
        load(broken)


# -- comma-separated values ------------------------------------------------------------------------


def test_a_label_is_true_or_false_in_any_spelling_and_a_row_with_another_is_dropped() -> None:
    right = {"True": 1, "true": 1, "TRUE": 1, "1": 1, "1 ": 1, "False": -1, "FALSE": -1, "0": -1}
    wrong = ("1 star", "0 (bad)")
    labels = enumerate([*right, *wrong])
    loaded = records(*({"prompt": str(i), "completion": "NA", "label": label} for i, label in labels))
    assert [group.rewards for group in loaded.groups] == [(float(reward),) for reward in right.values()]
    why = "not true or false: write true and false, or 1 and 0"
    assert [d.reason for d in loaded.dropped] == [f"'label' is '{label}', {why}" for label in wrong]


def test_messages_in_a_cell_texts_that_begin_like_a_list_and_bad_lines(tmp_path) -> None:
    asked = json.dumps([{"role": "user", "content": "q"}])
    begins = {"prompt": f"{asked} is JSON?", "chosen": '["a"] b', "rejected": "c"}
    path = tmp_path / "a.csv"
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(begins))
        writer.writeheader()
        writer.writerows([{"prompt": asked, "chosen": "a", "rejected": "b"}, begins, *PAIRS])
        stream.write("one,two\nc,,d\n")
    loaded = load(path, max_unreadable=0.7)
    assert words(loaded)[:2] == [
        (["q"], ["a", "b"], (1.0, -1.0)),
        ([f"{asked} is JSON?"], ['["a"] b', "c"], (1.0, -1.0)),
    ]
    assert words(loaded)[2:] == WHOLE
    dropped = [(d.row, d.reason) for d in loaded.dropped]
    assert dropped == [(16, "2 cells, but 3 columns"), (17, "no 'chosen'")]
