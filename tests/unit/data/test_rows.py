"""Damaged files, each made for real and read as a run reads it: what can be saved is, the rest is counted and
named, and nothing but the errors of this project comes out."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import ConfigError, DataError, UserError
from config.schema_data import DataConfig
from data import rows
from data.detection import FORMATS
from data.examples import Examples
from data.json_values import MOST_NESTED
from data.published import SOLVERS
from data.quality import DataReport
from data.rows import Loaded
from data.sources import load_splits
from reports import data_tables

GOOD = [{"prompt": f"question {i} ü", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(9)]
LINES = [json.dumps(record).encode() for record in GOOD]
KINDS = (".json", ".jsonl", ".json.gz", ".jsonl.gz")


def config(path: Path, form: str = "auto") -> DataConfig:
    return DataConfig(
        name="test",
        source="data.sources.local",
        path=str(path),
        format=form,
        eval_fraction=0.2,
        max_unreadable=1,
        apply_chat_template=form != "language_modelling",
    )


def load(path: Path, form: str = "auto") -> tuple[Loaded, Loaded]:
    """As a run does, its data report included, which quotes the rows."""
    train, evaluation = load_splits(config(path, form))
    report = DataReport.of(train, evaluation, Examples((), {}), {})
    path.with_suffix(".md").write_text(data_tables.page(report.to_dict()), encoding="utf-8")
    path.with_suffix(".report").write_text(json.dumps(report.to_dict()), encoding="utf-8")
    return train, evaluation


def refusal(path: Path, form: str = "auto") -> str | None:
    """The message that the file ends in; None where something of it can be used, and each of the other rows
    has a place and a reason."""
    try:
        train, _ = load(path, form)
    except UserError as error:
        return str(error)
    assert all(dropped.row and dropped.reason for dropped in train.dropped)
    return None


def write(path: Path, rows: list[bytes]) -> Path:
    """The rows as the file's name says."""
    content = b"\n".join(rows) + b"\n" if ".jsonl" in path.name else b"[" + b",\n ".join(rows) + b"\n]\n"
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def row(value: bytes) -> bytes:
    return b'{"prompt": ' + value + b', "chosen": "a", "rejected": "b"}'


NESTED = b"[" * (MOST_NESTED + 1) + b"]" * (MOST_NESTED + 1)
ROWS = {
    "half of a surrogate pair": (row(rb'"x \ud83d y"'), "surrogate"),
    "the other half": (row(rb'"\udE00"'), "surrogate"),
    "half a pair in a key": (b'{"a\\udc00": 1, ' + row(b'"x"')[1:], "surrogate"),
    "a byte of another encoding": (row(b'"caf\xe9"'), "byte 0xe9 is not UTF-8"),
    "an encoded surrogate": (row(b'"\xed\xa0\x80"'), "byte 0xed is not UTF-8"),
    "an integer without end": (row(b'"x"')[:-1] + b', "n": ' + b"7" * 5000 + b"}", "4300 digits"),
    "a bare integer without end": (b"-" + b"7" * 5000, "4300 digits"),
    "nested without end": (row(b"[" * 100_000 + b"]" * 100_000), "nested more than"),
    "nested beyond sense": (row(NESTED), "nested more than"),
    "nested text": (row(b'{"a": "]]]}", "b": ' + NESTED + b"}"), "nested more than"),
    "no object": (b"[1, 2]", "not a JSON object"),
    "null": (b"null", "not a JSON object"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ROWS)
def test_a_row_that_is_no_data_is_dropped_and_named_and_the_others_are_read(tmp_path, what, kind):
    bad, reason = ROWS[what]
    path = write(tmp_path / f"pairs{kind}", [*LINES[:4], bad, *LINES[4:]])
    train, evaluation = load(path)
    assert [(d.file, d.row) for d in train.dropped] == [(path.name, 5)]
    assert reason in train.dropped[0].reason
    assert train.read == 10 and len(train.groups) + len(evaluation.groups) == 9
    assert f"{path.name}, row 5: " in path.with_suffix(".md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", KINDS)
def test_a_byte_order_mark_and_escaped_pairs_are_read(tmp_path, kind):
    path = write(tmp_path / f"pairs{kind}", [*LINES, row(rb'"\ud83d\ude00 \\ud800"')])
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    marked = b"\xef\xbb\xbf" + content
    if ".jsonl" in kind:
        marked += b"\xef\xbb\xbf" + row(b'"of a second file"') + b"\r\n"
    path.write_bytes(gzip.compress(marked) if path.suffix == ".gz" else marked)
    train, evaluation = load(path)
    asked = {g.prompt.turns[0].content for g in train.groups + evaluation.groups}
    assert train.dropped == [] and {"😀 \\ud800", "question 0 ü"} <= asked
    assert len(asked) == (11 if ".jsonl" in kind else 10)


@pytest.mark.parametrize("kind", KINDS)
def test_another_unicode_encoding_is_refused_with_the_command_that_converts_it(tmp_path, kind):
    path = write(tmp_path / f"pairs{kind}", LINES)
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    other = content.decode().encode("utf-16")
    path.write_bytes(gzip.compress(other) if path.suffix == ".gz" else other)
    with pytest.raises(DataError, match=f"{path.name}: .*UTF-16.*iconv"):
        load(path)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.lists(JSON, max_size=6),
    indent=st.sampled_from([None, 0, 3, 40]),
    escaped=st.booleans(),
    cut=st.none() | st.floats(0, 1),
)
def test_a_list_is_what_the_library_reads(tmp_path, values, indent, escaped, cut):
    """And so is the place at which a damaged one ends."""
    text = json.dumps(values, indent=indent, ensure_ascii=escaped) + "\n"
    text = text if cut is None else text[: int(cut * len(text))]
    path = tmp_path / "pairs.json"
    path.write_bytes(text.encode())
    try:
        wanted: object = json.loads(text)
    except json.JSONDecodeError as error:
        wanted = f"({error.msg}: line {error.lineno} column {error.colno})"
    if isinstance(wanted, str):
        with pytest.raises(DataError, match=re.escape(wanted)):
            list(rows.read_rows(path))
        return
    found = list(rows.read_rows(path))
    assert [(one.number, one.values) for one in found if isinstance(one, rows.Row)] == [
        (number, value) for number, value in enumerate(wanted, 1) if isinstance(value, dict)
    ]
    assert len(found) == len(wanted)


@pytest.mark.parametrize("value", ["7" * 5000, "[" * 1500 + "]" * 1500], ids=["long", "deep"])
def test_a_value_that_cannot_be_read_ends_where_it_ends(tmp_path, value):
    """With brackets and escapes in the texts behind it."""
    path = tmp_path / "pairs.json"
    path.write_text('[{"n": ' + value + r', "s": "a } b, \\ \" ] [ {"}, {"x": 1}]')
    bad, good = rows.read_rows(path)
    assert isinstance(bad, rows.Dropped) and isinstance(good, rows.Row) and good.values == {"x": 1}


@pytest.mark.parametrize("kind", [".json", ".json.gz"])
def test_a_long_list_is_refused_with_the_command_that_converts_it(tmp_path, monkeypatch, kind):
    path = write(tmp_path / f"pairs{kind}", LINES)
    monkeypatch.setattr(rows, "_MOST", 100)
    with pytest.raises(DataError, match=rf"{path}.*jq -c '\.\[\]'.* > pairs\.jsonl"):
        load(path)


def test_a_list_that_breaks_off_or_goes_on_is_refused_by_line(tmp_path):
    path = tmp_path / "pairs.json"
    whole = b"[" + b",\n".join(LINES) + b"]"
    for damaged, where in (
        (whole[:-20], "line 9"),
        (whole.replace(b"},\n", b"}\n", 1), "line 2"),
        (whole[:-1] + b",]", "line 9"),
        (whole + b"x", "line 9"),
        (b"[" + b"[" * 100_000, "line 1"),
        (whole.replace(b'"bad 3"', b'"bad 3', 1), "line 4"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"pairs\.json: is not JSON .*{where} "):
            load(path)


def not_utf8(*values: bytes) -> pyarrow.Array:
    """A column of texts that says of its bytes what is not so, as some writers do."""
    made = pyarrow.array(list(values), pyarrow.binary())
    return pyarrow.Array.from_buffers(pyarrow.string(), len(made), made.buffers())


def test_a_row_of_a_table_that_cannot_be_had_is_dropped_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    answers = {"chosen": ["a", "b", "c"], "rejected": ["x", "y", "z"]}
    late = pyarrow.array([1, 2**60, 3], pyarrow.timestamp("ms"))
    for name, table, reason in (
        ("text", {"prompt": not_utf8(b"one", b"caf\xe9", b"three"), **answers}, "byte 0xe9 is not UTF-8"),
        ("date", {"prompt": ["one", "two", "three"], "when": late, **answers}, "cannot be read"),
    ):
        path = tmp_path / name / "train.parquet"
        path.parent.mkdir()
        pyarrow.parquet.write_table(pyarrow.table(table), path)
        for source, where in (("data.sources.local", path), ("data.sources.hub_table", path.parent)):
            asked = DataConfig(name="test", source=source, path=str(where), eval_fraction=0, max_unreadable=1)
            train, _ = load_splits(asked)
            assert [d.row for d in train.dropped] == [2] and reason in train.dropped[0].reason
            assert [g.prompt.turns[0].content for g in train.groups] == ["one", "three"]


def test_a_conversation_that_goes_in_a_circle_ends(tmp_path):
    message = {"lang": "en", "text": "words"}
    tree = (
        {"message_id": "a", "parent_id": "b", "role": "prompter"},
        {"message_id": "b", "parent_id": "a", "role": "prompter"},
        {"message_id": "c", "parent_id": "a", "role": "assistant", "rank": 0},
        {"message_id": "d", "parent_id": "a", "role": "assistant", "rank": 1},
    )
    path = write(tmp_path / "oasst.jsonl", [json.dumps(message | node).encode() for node in tree])
    with pytest.raises(DataError, match=r"the conversation is a circle.* row 4"):
        load(path, "oasst")


# Damage of every sort, by seed

HUGE = 10**400


def wrong_values() -> list[object]:
    deep: object = "x"
    for _ in range(40):
        deep = [deep]
    numbers = [3, -1, HUGE, 1e308, float("nan"), float("inf"), True]
    texts = ["", " ", "\x00\x1b[2J\u202e", "x" * 70_000]
    nested = [{}, {"gpt-4": 3}, [], [[]], [None], [{"role": "user"}], [{"role": [], "content": "x"}], deep]
    return [None, *numbers, *texts, *nested]


SOUND: dict[str, dict[str, object]] = {
    "preference": dict(GOOD[0]),
    "unpaired": {"prompt": "q", "completion": "a", "label": True},
    "prompt_completion": {
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    },
    "prompt_only": {"prompt": "q", "reference": "4"},
    "feedback": {"type": "scalar_feedback", "prompt": "q", "output": "a", "reward": 1.0},
    "groups": {
        "prompt": "q",
        "completions": [{"text": "a", "token_ids": [1], "finished": True, "tokenizer": "0"}, "b"],
        "rewards": [1.0, 0.0],
    },
    "hh": {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"},
    "alpacaeval": {"instruction": "q", "output_1": "a", "output_2": "b", "preference": 2},
    "compared": {"prompt": "q", "response_a": "a", "response_b": "b", "winner": "b"},
    "scored": {"instruction": "q", "output": "a", "system": "s", "history": [["a", "b"]], "reward": 1},
    "ultrafeedback": {
        "instruction": "q",
        "completions": [{"response": name, "overall_score": len(name)} for name in ("a", "bb")],
    },
    "language_modelling": {"text": "one word and more"},
    "gsm8k": {"question": "q", "answer": "so #### 4"},
    "gsm8k_solutions": {
        "question": "q",
        "ground_truth": "so\nA: 4",
        **{name: {"solution": "a", "is_correct": name < "6"} for name in SOLVERS},
    },
    "math": {"problem": "q", "solution": "s", "answer": "4"},
    "s1k": {"question": "q", "deepseek_thinking_trajectory": "t", "deepseek_attempt": "a"},
    "safe_rlhf": {"prompt": "q", "response_0": "a", "response_1": "b", "better_response_id": 1},
    "wildbench": {"conversation_input": [{"role": "user", "content": "q"}], "references": {"gpt-4": "a"}},
    "shp": {"history": "q", "human_ref_A": "a", "human_ref_B": "b", "labels": 1, "score_A": 9, "score_B": 2},
    "oasst": {"lang": "en", "message_id": "b", "parent_id": "a", "role": "assistant", "text": "d", "rank": 1},
}
COMPANY: dict[str, list[dict[str, object]]] = {
    "oasst": [
        {"lang": "en", "message_id": "a", "parent_id": None, "role": "prompter", "text": "q", "rank": None},
        {"lang": "en", "message_id": "c", "parent_id": "a", "role": "assistant", "text": "e", "rank": 0},
    ]
}
"""Sound rows without which one of this format says nothing."""


def test_every_format_is_tried():
    assert SOUND.keys() == FORMATS.keys()


def replaced(found: object, rng: random.Random) -> object:
    """A copy in which one value, however deep, is another."""
    keys = (
        list(found) if isinstance(found, dict) else list(range(len(found))) if isinstance(found, list) else []
    )
    if not keys or rng.random() < 0.3:
        return rng.choice(wrong_values())
    key = rng.choice(keys)
    copy = found.copy()  # type: ignore[attr-defined]
    copy[key] = replaced(copy[key], rng)
    return copy


@pytest.mark.parametrize("form", SOUND)
def test_no_value_of_a_row_ends_in_a_traceback(tmp_path, form):
    """Thirty rows with one wrong value each, alone and among sound ones; each is used, or dropped for a
    reason of a sensible length."""
    rng, sound = random.Random(form), SOUND[form]
    company = [json.dumps(other).encode() for other in COMPANY.get(form, [])]
    damaged = []
    while len(damaged) < 30:
        changed = replaced(sound, rng)
        if isinstance(changed, dict):
            damaged.append(json.dumps(changed).encode())
    lines = [*company, json.dumps(sound).encode(), *damaged]
    rng.shuffle(lines)
    train, _ = load(write(tmp_path / "all.jsonl", lines), form)
    assert train.read == len(lines)
    for dropped in train.dropped:
        assert dropped.row and len(dropped.reason) < 300, dropped
    for i, line in enumerate(damaged):
        said = refusal(write(tmp_path / f"{i}.jsonl", [*company, line]), form)
        assert said is None or f"{i}.jsonl" in said


def cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def flipped(content: bytes, rng: random.Random) -> bytes:
    found = bytearray(content)
    for _ in range(rng.randrange(1, 9)):
        found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    return bytes(found)


def spliced(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content))
    odd = [b"\x00", b"\xff\xfe", b"\xe9", b"\x1b", b"{", b'"', b"\\ud800", b"NaN", b"\r"]
    pieces = [*odd, b"[" * 2000, b"9" * 5000]
    return content[:at] + rng.choice(pieces) + content[at + rng.randrange(3) :]


def packed_damage(content: bytes, rng: random.Random) -> bytes:
    """Damage inside a sound gzip, where it is one."""
    how = rng.choice((cut, flipped, spliced))
    packed = content[:2] == b"\x1f\x8b"
    return gzip.compress(how(gzip.decompress(content), rng)) if packed else how(content, rng)


DAMAGE: tuple[Callable[[bytes, random.Random], bytes], ...] = (cut, flipped, spliced, packed_damage)


@pytest.mark.parametrize("kind", [*KINDS, ".parquet"])
def test_no_damaged_file_ends_in_a_traceback(tmp_path, kind):
    """Thirty files: each is read in part, or refused by its name."""
    whole = tmp_path / f"whole{kind}"
    if kind == ".parquet":
        datasets.Dataset.from_list(GOOD * 20).to_parquet(whole)
    else:
        write(whole, LINES * 20)
    rng, refused = random.Random(kind), []
    for i in range(30):
        path = tmp_path / f"{i}{kind}"
        path.write_bytes(DAMAGE[i % 4](whole.read_bytes(), rng))
        said = refusal(path)
        if said is not None:
            refused.append(path.name)
            assert path.name in said
    assert len(refused) < 30


def test_a_stream_that_zlib_refuses_is_refused_by_name(tmp_path):
    """Bits in the middle of a gzip file end in zlib's own error at most places, and in a wrong checksum at
    others."""
    rows = [json.dumps(random.Random(i).random()).encode() for i in range(3000)]
    path = write(tmp_path / "pairs.jsonl.gz", rows)
    sound = path.read_bytes()
    for at in range(12, len(sound), len(sound) // 12):
        path.write_bytes(sound[:at] + b"\xff\xff\xff\xff" + sound[at + 4 :])
        with pytest.raises(DataError, match=r"pairs\.jsonl\.gz: cannot be read to its end .*again"):
            load(path)


def test_a_file_is_known_by_its_content_and_what_is_none_is_named(tmp_path):
    (tmp_path / "packed.csv").write_bytes(gzip.compress(b"a,b\n1,2\n"))
    (tmp_path / "plain.jsonl.gz").write_bytes(b'{"a": 2}\n')
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    assert [row.values for row in rows.read_rows(tmp_path / "packed.csv")] == [{"a": "1", "b": "2"}]
    assert [row.values for row in rows.read_rows(tmp_path / "plain.jsonl.gz")] == [{"a": 2}]
    for name, what in (("pipe.jsonl", "is a folder, pipe or device"), ("loop.jsonl", "is a link to no file")):
        with pytest.raises(ConfigError, match=what):
            next(rows.read_rows(tmp_path / name))
