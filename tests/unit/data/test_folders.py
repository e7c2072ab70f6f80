"""Folders of data and tables of comma-separated values: whatever way somebody keeps the same pairs, the same
groups."""

from __future__ import annotations

import csv
import gzip
import json
from dataclasses import replace
from pathlib import Path

import datasets
import pytest

from common.errors import ConfigError, DataError
from data.rows import Loaded
from data.sources import Split, load_groups, load_splits, shards
from tests.unit.data.people import lines, local

PAIRS = [{"prompt": f"question {i}, ü", "chosen": f"good\n{i}", "rejected": f'"bad" {i}'} for i in range(12)]


def load(path: Path, split: Split = "train", **more: object) -> Loaded:
    return load_groups(local(path, **more), split)


def texts(loaded: Loaded) -> list[tuple[str, ...]]:
    return [(g.prompt.turns[-1].content, *(str(c.text) for c in g.completions)) for g in loaded.groups]


WHOLE = [(p["prompt"], p["chosen"], p["rejected"]) for p in PAIRS]


def table(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def saved(folder: Path) -> Path:
    datasets.Dataset.from_list(PAIRS).save_to_disk(folder)
    return folder


def saved_dict(folder: Path) -> Path:
    one, other = datasets.Dataset.from_list(PAIRS), datasets.Dataset.from_list(PAIRS[:3])
    datasets.DatasetDict({"train": one, "test": other}).save_to_disk(folder)
    return folder


def parquet_shards(folder: Path) -> Path:
    for i in range(3):
        part = datasets.Dataset.from_list(PAIRS[4 * i : 4 * i + 4])
        part.to_parquet(folder / "data" / f"train-0000{i}-of-00003.parquet")
    datasets.Dataset.from_list(PAIRS[:3]).to_parquet(folder / "data" / "test-00000-of-00001.parquet")
    (folder / "README.md").write_text("about")
    return folder


def line_shards(folder: Path) -> Path:
    for i in range(0, 12, 4):
        lines(folder / f"pairs-{i}.jsonl", PAIRS[i : i + 4])
    return folder


def split_folders(folder: Path) -> Path:
    parts = {"train/0": PAIRS[:5], "train/1": PAIRS[5:], "test/0": PAIRS[:3], ".cache/old": PAIRS[:1]}
    for name, rows in parts.items():
        lines(folder / f"{name}.jsonl", rows)
    return folder


@pytest.mark.parametrize("make", [saved, saved_dict, parquet_shards, line_shards, split_folders])
def test_a_folder_gives_what_a_file_gives(tmp_path, make) -> None:
    folder, path = make(tmp_path / "set"), lines(tmp_path / "a.jsonl", PAIRS)
    loaded = load(folder)
    assert texts(loaded) == WHOLE and loaded.read == 12 and loaded.format == "preference"
    splits = [[texts(part) for part in load_splits(local(of, eval_fraction=0.3))] for of in (folder, path)]
    assert splits[0] == splits[1], "prompts are held out as of a file"
    if make not in (saved, line_shards):
        assert texts(load(folder, "eval", eval_split="test")) == WHOLE[:3]
        assert texts(load(path, "eval", eval_path=str(folder), eval_split="test")) == WHOLE[:3]
        with pytest.raises(ConfigError, match=r"data.split=nope: .* has test, train: give one of them"):
            load_groups(replace(local(folder), split="nope"), "train")
    if make is saved_dict:
        hub = {"source": "data.sources.hub_table"}
        assert texts(load(folder, **hub)) == WHOLE
        assert texts(load(folder, "eval", eval_split="test", **hub)) == WHOLE[:3]


@pytest.mark.parametrize("kind", ["folder", "parquet"])
def test_numbers_of_classes_are_read_by_their_names(tmp_path, kind) -> None:
    """``class_encode_column`` numbers names by the alphabet: 0 may be the desirable one."""

    def written(path: Path, names: tuple[str, str]) -> Path:
        rows = [{"prompt": f"q{i}", "completion": f"a{i}", "label": names[i % 2]} for i in range(4)]
        table = datasets.Dataset.from_list(rows).class_encode_column("label")
        assert table.features["label"].names == sorted(names)
        (table.save_to_disk if kind == "folder" else table.to_parquet)(path)
        return path

    suffix = ".parquet" * (kind == "parquet")
    path = written(tmp_path / f"a{suffix}", ("true", "false"))
    loaded = load_groups(local(path, eval_fraction=0), "train")
    found = [(g.prompt.turns[0].content, g.rewards) for g in loaded.groups]
    assert found == [(f"q{i}", ((-1.0) ** i,)) for i in range(4)]
    path = written(tmp_path / f"b{suffix}", ("desirable", "undesirable"))
    with pytest.raises(DataError, match="'label' is 'desirable', not true or false"):
        load_groups(local(path, eval_fraction=0), "train")


SPLITS = {
    "train_prefs-00000-of-00001.parquet test_p-00000-of-00001.parquet": {"train_prefs": 1, "test_p": 1},
    "train-00000-of-00002-2a3ca2d4b5ca2f0b.parquet train-00001-of-00002.parquet": {"train": 2},
    "data/test-00000-of-00001.parquet dataset_infos.json data/dataset_info.json": {"test": 1},
    "mine_train.jsonl mine_test.jsonl": {"train": 1, "test": 1},
    "validation/a.json train/b.json": {"validation": 1, "train": 1},
    "pretraining.jsonl latest.csv": {"train": 2},
    "Train.jsonl TEST.jsonl": {"train": 1, "test": 1},
    "pairs.jsonl held_out.jsonl Held-Out.csv holdout.json": {
        "train": 1, "held_out": 1, "held-out": 1, "holdout": 1},
    "README.md _notes.jsonl .hidden/a.jsonl": {},
}  # fmt: skip


@pytest.mark.parametrize(("files", "splits"), SPLITS.items())
def test_the_names_of_shards_say_their_split(tmp_path, files, splits) -> None:
    for name in files.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert {split: len(paths) for split, paths in shards(tmp_path).items()} == splits


def test_what_is_read_of_a_folder_and_what_is_wrong_with_it_is_said(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"data.path=.* has no file that can be read; put .json"):
        load(tmp_path)
    lines(tmp_path / "two" / "Train.jsonl", PAIRS)
    lines(tmp_path / "two" / "Held_out.jsonl", PAIRS[:3])
    loaded = load(tmp_path / "two")
    assert loaded.origin == f"{tmp_path}/two (Train.jsonl)" and texts(loaded) == WHOLE
    held_out = load_groups(local(tmp_path / "two", split="held_out"), "train")
    assert held_out.origin == f"{tmp_path}/two (Held_out.jsonl)"
    folder = line_shards(tmp_path / "set")
    with (folder / "pairs-4.jsonl").open("a") as stream:
        stream.write("{broken\n")
    loaded = load(folder)
    assert [(d.file, d.row) for d in loaded.dropped] == [("pairs-4.jsonl", 5)] and texts(loaded) == WHOLE
    broken = saved(tmp_path / "broken")
    next(broken.glob("*.arrow")).write_bytes(b"not arrow")
    with pytest.raises(DataError, match="save it again with save_to_disk"):
        load(broken)


# -- comma-separated values ------------------------------------------------------------------------


def test_a_label_is_true_or_false_in_any_spelling_and_a_row_with_another_is_dropped(tmp_path) -> None:
    right = {"True": 1, "true": 1, "TRUE": 1, "1": 1, "1 ": 1, "False": -1, "FALSE": -1, "0": -1}
    wrong = ("1 star", "0 (bad)")
    rows = [
        {"prompt": str(i), "completion": "NA", "label": label} for i, label in enumerate([*right, *wrong])
    ]
    loaded = load(table(tmp_path / "a.csv", rows), max_unreadable=0.7)
    assert [group.rewards for group in loaded.groups] == [(float(reward),) for reward in right.values()]
    assert texts(loaded) == [(str(i), "NA") for i in range(len(right))]
    why = "not true or false: write true and false, or 1 and 0"
    assert [d.reason for d in loaded.dropped] == [f"'label' is '{label}', {why}" for label in wrong]


def test_messages_in_a_cell_texts_that_begin_like_a_list_and_bad_lines(tmp_path) -> None:
    asked = json.dumps([{"role": "user", "content": "q"}])
    begins = {"prompt": f"{asked} is JSON?", "chosen": '["a"] b', "rejected": "c"}
    path = table(tmp_path / "a.csv", [{"prompt": asked, "chosen": "a", "rejected": "b"}, begins, *PAIRS])
    with path.open("a") as stream:
        stream.write("one,two\nc,,d\n")
    (packed := path.with_name("a.csv.gz")).write_bytes(gzip.compress(path.read_bytes()))
    for loaded in (load(of, max_unreadable=0.7) for of in (path, packed)):
        assert texts(loaded) == [("q", "a", "b"), (f"{asked} is JSON?", '["a"] b', "c"), *WHOLE]
        dropped = [(d.row, d.reason) for d in loaded.dropped]
        assert dropped == [(16, "2 cells, but 3 columns"), (17, "no 'chosen'")]


OPEN = {  # to the end of the file, to another quote, in the first line, in the last cell
    'prompt,chosen,rejected\nq,"a\nb",c\nq,"a,b\nr,c,d\ns,e,f\n': (6, 4),
    'prompt,chosen,rejected\nq,"a,b\nr,c,"d"\ns,e,f\n': (3, 2),
    '"prompt,chosen,rejected\nq,a,b\n': (2, 1),
    'prompt,chosen,rejected\nq,a,"b': (2, 2),
}


def test_a_quote_that_is_not_closed_is_refused_with_its_line(tmp_path) -> None:
    path = tmp_path / "a.csv"
    for content, (line, begins) in OPEN.items():
        path.write_text(content)
        with pytest.raises(DataError, match=rf"a\.csv: line {line} is not CSV .* begins at line {begins};"):
            load(path)
