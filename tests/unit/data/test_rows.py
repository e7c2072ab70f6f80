"""Damaged files, each made for real and read as a run reads it: what can be saved is, the rest is counted and
named, and nothing but the errors of this project comes out."""

from __future__ import annotations

import functools
import gzip
import itertools
import json
import os
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from common.errors import ConfigError, DataError, UserError
from data import rows
from data.detection import FORMATS
from data.examples import Examples
from data.json_values import MOST_NESTED
from data.quality import DataReport
from data.rows import Loaded
from data.sources import folder_rows, load_splits
from reports import data_tables
from tests.unit.data.people import ROWS, local

GOOD = [{"prompt": f"question {i} ü", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(9)]
LINES = [json.dumps(record).encode() for record in GOOD]
KINDS = (".json", ".jsonl", ".jsonl.gz")


def load(path: Path, form: str = "auto") -> tuple[Loaded, Loaded]:
    """As a run does, its data report included, which quotes the rows."""
    settings = {"format": form, "apply_chat_template": form != "language_modelling"}
    train, evaluation = load_splits(local(path, eval_fraction=0.2, max_unreadable=1, **settings))
    report = DataReport.of(train, evaluation, Examples((), {}), {})
    path.with_suffix(".md").write_text(data_tables.page(report.to_dict()), encoding="utf-8")
    json.dumps(report.to_dict()).encode()
    return train, evaluation


def write(path: Path, rows: list[bytes]) -> Path:
    """The rows as the file's name says."""
    content = b"\n".join(rows) + b"\n" if ".jsonl" in path.name else b"[" + b",\n ".join(rows) + b"\n]\n"
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def row(value: bytes) -> bytes:
    return b'{"prompt": ' + value + b', "chosen": "a", "rejected": "b"}'


NESTED = b"[" * (MOST_NESTED + 1) + b"]" * (MOST_NESTED + 1)
SPOILT = {
    "half of a surrogate pair": (row(rb'"x \ud83d y"'), "surrogate"),
    "a byte of another encoding": (row(b'"caf\xe9"'), "byte 0xe9 is not UTF-8"),
    "an integer without end": (row(b'"x"')[:-1] + b', "n": ' + b"7" * 5000 + b"}", "4300 digits"),
    "nested without end": (row(b"[" * 100_000 + b"]" * 100_000), "nested more than"),
    "nested beyond sense": (row(NESTED), "nested more than"),
    "nested text": (row(b'{"a": "]]]}", "b": ' + NESTED + b"}"), "nested more than"),
    "no object": (b"[1, 2]", "not a JSON object"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", SPOILT)
def test_a_row_that_is_no_data_is_dropped_and_named_and_the_others_are_read(tmp_path, what, kind):
    bad, reason = SPOILT[what]
    path = write(tmp_path / f"pairs{kind}", [*LINES[:4], bad, *LINES[4:]])
    if ".jsonl" not in kind and "without end" in what:  # Python reads such a list not at all
        with pytest.raises(DataError, match=f"{reason}.*; write one object a line"):
            load(path)
        return
    train, evaluation = load(path)
    assert [(d.file, d.row) for d in train.dropped] == [(path.name, 5)]
    assert reason in train.dropped[0].reason
    assert train.read == 10 and len(train.groups) + len(evaluation.groups) == 9
    assert f"{path.name}, row 5: " in path.with_suffix(".md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", [".json", ".jsonl"])
def test_a_byte_order_mark_is_read_and_a_long_list_is_refused_with_a_command(tmp_path, monkeypatch, kind):
    second = b"\xef\xbb\xbf" + row(b'"of a second file"') + b"\r\n" if kind == ".jsonl" else b""
    path = write(tmp_path / f"pairs{kind}", [*LINES, row(rb'"\ud83d\ude00 \\ud800"')])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes() + second)
    train, evaluation = load(path)
    asked = {g.prompt.turns[0].content for g in train.groups + evaluation.groups}
    assert train.dropped == [] and {"😀 \\ud800", "question 0 ü"} <= asked
    assert len(asked) == (11 if kind == ".jsonl" else 10)
    if kind == ".json":
        write(path, LINES)
        monkeypatch.setattr(rows, "_MOST", 100)
        with pytest.raises(DataError, match=rf"{path}.*jq -c '\.\[\]'.* > pairs\.jsonl"):
            load(path)


def test_a_table_with_a_value_that_cannot_be_had_is_refused(tmp_path):
    """A text whose bytes are none, as some writers leave them, and a date beyond the calendar."""
    answers = {"chosen": ["a", "b", "c"], "rejected": ["x", "y", "z"]}
    raw = pyarrow.array([b"one", b"caf\xe9", b"three"], pyarrow.binary())
    texts = pyarrow.Array.from_buffers(pyarrow.string(), len(raw), raw.buffers())
    late = pyarrow.array([1, 2**60, 3], pyarrow.timestamp("ms"))
    for name, table in (("text", {"prompt": texts}), ("date", {"prompt": ["a", "b", "c"], "when": late})):
        path = tmp_path / f"{name}.parquet"
        pyarrow.parquet.write_table(pyarrow.table(table | answers), path)
        with pytest.raises(DataError, match="one of the rows 1 to 3 cannot be read"):
            load_splits(local(path))


def test_a_file_is_known_by_its_content_and_what_is_none_is_named(tmp_path):
    (tmp_path / "packed.csv").write_bytes(gzip.compress(b"a,b\n1,2\n"))
    (tmp_path / "plain.jsonl.gz").write_bytes(b'{"a": 2}\n')
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    assert [row.values for row in rows.read_rows(tmp_path / "packed.csv")] == [{"a": "1", "b": "2"}]
    assert [row.values for row in rows.read_rows(tmp_path / "plain.jsonl.gz")] == [{"a": 2}]
    for name, what in (("pipe.jsonl", "is a folder, pipe or device"), ("loop.jsonl", "is a link to no file")):
        (folder := tmp_path / f"with {name}").mkdir()
        (tmp_path / name).rename(folder / name)
        for found in (rows.read_rows(folder / name), folder_rows(folder, None, "x", "y")):
            with pytest.raises(ConfigError, match=what):
                next(found)


# Damage of every sort, by seed


DEEP: object = functools.reduce(lambda inner, _: [inner], range(40), "x")
WRONG = [
    *(None, 3, -1, 10**400, 1e308, float("nan"), float("inf"), True),
    *("", " ", "\x00\x1b[2J\u202e", "x" * 70_000),
    *({}, {"gpt-4": 3}, [], [[]], [None], [{"role": "user"}], [{"role": [], "content": "x"}], DEEP),
]


def replaced(found: object, rng: random.Random) -> object:
    """A copy in which one value, however deep, is another."""
    keys = list(found) if isinstance(found, dict) else [*range(len(found))] if isinstance(found, list) else []
    if not keys or rng.random() < 0.3:
        return rng.choice(WRONG)
    key = rng.choice(keys)
    copy = found.copy()  # type: ignore[attr-defined]
    copy[key] = replaced(copy[key], rng)
    return copy


@pytest.mark.parametrize("form", FORMATS)
def test_no_value_of_a_row_ends_in_a_traceback(tmp_path, form):
    """Rows with one wrong value each, alone and among sound ones; each is used, or dropped for a reason of a
    sensible length."""
    rng, sound = random.Random(form), next(of for of in ROWS["formats"] if of["form"] == form)
    company = [json.dumps(other).encode() for other in sound.get("also", [])]
    every = (replaced(sound["row"], rng) for _ in itertools.count())
    objects = (one for one in every if isinstance(one, dict))
    damaged = [json.dumps(one).encode() for one in itertools.islice(objects, 20)]
    lines = [*company, json.dumps(sound["row"]).encode(), *damaged]
    rng.shuffle(lines)
    train, _ = load(write(tmp_path / "all.jsonl", lines), form)
    assert train.read == len(lines)
    every, refused = [*train.dropped], dict[str, str]()
    for i, line in enumerate(damaged):
        path = write(tmp_path / f"{i}.jsonl", [*company, line])
        try:
            every += load(path, form)[0].dropped
        except UserError as error:
            refused[path.name] = str(error)
    assert all(dropped.row and 0 < len(dropped.reason) < 300 for dropped in every)
    assert all(name in message for name, message in refused.items())
