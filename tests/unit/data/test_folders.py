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
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ConfigError, DataError
from data.folders import shards
from data.rows import Loaded, Row, read_rows
from data.sources import Split, load_groups, load_splits
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
    (folder / "data").mkdir(parents=True)
    for i in range(3):
        part = datasets.Dataset.from_list(PAIRS[4 * i : 4 * i + 4])
        part.to_parquet(folder / "data" / f"train-0000{i}-of-00003.parquet")
    datasets.Dataset.from_list(PAIRS[:3]).to_parquet(folder / "data" / "test-00000-of-00001.parquet")
    (folder / "README.md").write_text("about")
    return folder


def line_shards(folder: Path) -> Path:
    for i in range(3):
        lines(folder / f"pairs-{i}.jsonl", PAIRS[4 * i : 4 * i + 4])
    return folder


def split_folders(folder: Path) -> Path:
    lines(folder / "train" / "0.jsonl", PAIRS[:5])
    lines(folder / "train" / "1.jsonl", PAIRS[5:])
    lines(folder / "test" / "0.jsonl", PAIRS[:3])
    lines(folder / ".cache" / "old.jsonl", PAIRS[:1])
    return folder


MAKERS = [saved, saved_dict, parquet_shards, line_shards, split_folders]


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_a_folder_gives_what_a_file_gives(tmp_path, make) -> None:
    folder = make(tmp_path / "set")
    loaded = load(folder)
    assert texts(loaded) == WHOLE and loaded.read == 12 and loaded.format == "preference"
    if make in (saved_dict, parquet_shards, split_folders):
        assert texts(load(folder, "eval", eval_split="test")) == WHOLE[:3]
        path = lines(tmp_path / "a.jsonl", PAIRS)
        assert texts(load(path, "eval", eval_path=str(folder), eval_split="test")) == WHOLE[:3]
        with pytest.raises(ConfigError, match=r"data.split=nope: .* has test, train: give one of them"):
            load_groups(replace(local(folder), split="nope"), "train")


def test_a_saved_set_is_read_as_one_of_the_hub_too(tmp_path) -> None:
    path, hub = saved_dict(tmp_path / "set"), {"source": "data.sources.hub_table"}
    assert texts(load(path, **hub)) == WHOLE
    assert texts(load(path, "eval", eval_split="test", **hub)) == WHOLE[:3]


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


def test_prompts_are_held_out_of_a_folder_as_of_a_file(tmp_path) -> None:
    def splits(path: Path) -> list[list[tuple[str, ...]]]:
        return [texts(loaded) for loaded in load_splits(local(path, eval_fraction=0.3))]

    assert splits(line_shards(tmp_path / "set")) == splits(lines(tmp_path / "a.jsonl", PAIRS))


@pytest.mark.parametrize(
    ("files", "splits"),
    [
        (["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"], {"train": 2}),
        (
            ["train_prefs-00000-of-00001.parquet", "test_prefs-00000-of-00001.parquet"],
            {"train_prefs": 1, "test_prefs": 1},
        ),
        (["train-00000-of-00001-2a3ca2d4b5ca2f0b.parquet"], {"train": 1}),
        (["data/test-00000-of-00001.parquet", "dataset_infos.json", "data/dataset_info.json"], {"test": 1}),
        (["mine.jsonl", "more.csv"], {"train": 2}),
        (["mine_train.jsonl", "mine_test.jsonl"], {"train": 1, "test": 1}),
        (["validation/a.json", "train/b.json"], {"validation": 1, "train": 1}),
        (["pretraining.jsonl", "latest.jsonl"], {"train": 2}),
        (["Train.jsonl", "TEST.jsonl"], {"train": 1, "test": 1}),
        (["pairs.jsonl", "held_out.jsonl", "Held-Out.csv", "holdout.json", "heldout-0.jsonl"],
         {"train": 1, "held_out": 1, "held-out": 1, "holdout": 1, "heldout-0": 1}),
        (["README.md", "_notes.jsonl", ".hidden/a.jsonl"], {}),
    ],
)  # fmt: skip
def test_the_names_of_shards_say_their_split(tmp_path, files, splits) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert {split: len(paths) for split, paths in shards(tmp_path).items()} == splits


def test_the_files_of_a_folder_that_are_read_are_named(tmp_path) -> None:
    lines(tmp_path / "Train.jsonl", PAIRS)
    lines(tmp_path / "Held_out.jsonl", PAIRS[:3])
    loaded = load(tmp_path)
    assert loaded.origin == f"{tmp_path} (Train.jsonl)" and texts(loaded) == WHOLE
    assert load_groups(local(tmp_path, split="held_out"), "train").origin == f"{tmp_path} (Held_out.jsonl)"


def test_what_is_wrong_with_a_folder_is_said(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"data.path=.* has no file that can be read; put .json"):
        load(tmp_path)
    folder = line_shards(tmp_path / "set")
    with (folder / "pairs-1.jsonl").open("a") as stream:
        stream.write("{broken\n")
    loaded = load(folder)
    assert [(d.file, d.row) for d in loaded.dropped] == [("pairs-1.jsonl", 5)] and texts(loaded) == WHOLE
    broken = saved(tmp_path / "broken")
    next(broken.glob("*.arrow")).write_bytes(b"not arrow")
    with pytest.raises(DataError, match="save it again with save_to_disk"):
        load(broken)


# -- comma-separated values ------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_a_table_of_texts_is_read_as_it_was_written(tmp_path, packed) -> None:
    path = table(tmp_path / "pairs.csv", PAIRS)
    if packed:
        path = path.with_name("pairs.csv.gz")
        path.write_bytes(gzip.compress((tmp_path / "pairs.csv").read_bytes()))
    assert texts(load(path)) == WHOLE


PRINTABLE = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1)


@settings(max_examples=60)
@given(st.lists(st.tuples(PRINTABLE, PRINTABLE), min_size=1, max_size=5))
def test_every_text_survives_the_table(tmp_path_factory, rows) -> None:
    path = tmp_path_factory.mktemp("t") / "a.csv"
    table(path, [{"prompt": one, "completion": other} for one, other in rows])
    found = [row for row in read_rows(path) if isinstance(row, Row)]
    read = [(row.values["prompt"], row.values["completion"]) for row in found]
    assert [
        cells for cells, (one, _) in zip(read, rows, strict=True) if not one.startswith(("[{", '["'))
    ] == [cells for cells in rows if not cells[0].startswith(("[{", '["'))]


@pytest.mark.parametrize(
    ("cell", "reward"),
    [("True", 1), ("true", 1), ("TRUE", 1), ("1", 1), ("False", -1), ("FALSE", -1), ("0", -1)],
)
def test_a_label_is_true_or_false_in_any_spelling(tmp_path, cell, reward) -> None:
    row = {"prompt": "1", "completion": "NA", "label": cell}
    (group,) = load(table(tmp_path / "a.csv", [row])).groups
    assert group.rewards == (reward,) and group.completions[0].text == "NA"
    assert group.prompt.turns[0].content == "1"


def test_messages_in_a_cell_and_bad_lines(tmp_path) -> None:
    asked = json.dumps([{"role": "user", "content": "q"}])
    path = table(tmp_path / "a.csv", [{"prompt": asked, "chosen": "a", "rejected": "b"}])
    assert texts(load(path)) == [("q", "a", "b")]
    with path.open("a") as stream:
        stream.write("one,two\nc,,d\n")
    loaded = load(path, max_unreadable=0.7)
    assert [(d.row, d.reason) for d in loaded.dropped] == [(3, "2 cells, but 3 columns"), (4, "no 'chosen'")]


@pytest.mark.parametrize(
    ("row", "known"),
    [
        ({"instruction": "q", "generations": ["a", "b"], "ratings": [4.0, 3.0]}, ("q", "a", "b")),
        ({"instruction": "q", "output": "a", "history": [["Hi", "Hello"]]}, ("q", "a")),
    ],
)
def test_lists_of_a_known_format_are_read_from_cells(tmp_path, row, known) -> None:
    cells = {key: json.dumps(value) if isinstance(value, list) else value for key, value in row.items()}
    ours, same = load(table(tmp_path / "a.csv", [cells])), load(lines(tmp_path / "a.jsonl", [row]))
    assert texts(ours) == [known] and ours.groups == same.groups


def test_a_row_whose_label_only_begins_like_one_is_dropped_with_its_reason(tmp_path) -> None:
    rows = [{"prompt": "q", "completion": "a", "label": label} for label in ("1 ", "1 star", "0 (bad)")]
    loaded = load(table(tmp_path / "a.csv", rows), max_unreadable=0.7)
    assert [group.rewards for group in loaded.groups] == [(1.0,)]
    assert [(d.row, d.reason) for d in loaded.dropped] == [
        (3, "'label' is '1 star', not true or false: write true and false, or 1 and 0"),
        (4, "'label' is '0 (bad)', not true or false: write true and false, or 1 and 0"),
    ]


def test_a_text_that_begins_like_a_list_keeps_its_end(tmp_path) -> None:
    asked = '[{"role":"user","content":"hi"}] is JSON?'
    path = table(tmp_path / "a.csv", [{"prompt": asked, "chosen": '["a"] b', "rejected": "c"}])
    assert texts(load(path)) == [(asked, '["a"] b', "c")]


@pytest.mark.parametrize(
    ("content", "line", "begins"),
    [
        ('prompt,chosen,rejected\nq,"a\nb",c\nq,"a,b\nr,c,d\ns,e,f\n', 6, 4),
        ('prompt,chosen,rejected\nq,"a,b\nr,c,"d"\ns,e,f\n', 3, 2),
        ('"prompt,chosen,rejected\nq,a,b\n', 2, 1),
        ('prompt,chosen,rejected\nq,a,"b', 2, 2),
    ],
    ids=["to the end of the file", "to another quote", "in the first line", "in the last cell"],
)
def test_a_quote_that_is_not_closed_is_refused_with_its_line(tmp_path, content, line, begins) -> None:
    path = tmp_path / "a.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=rf"a\.csv: line {line} is not CSV .* begins at line {begins};"):
        load(path)
