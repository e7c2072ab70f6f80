"""Scores on disk: what comes back is what was written, or nothing."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.errors import StoppedError
from models import score_cache
from models.score_cache import ScoreCache, ScoreTable
from tests.full_disk import full_disk

PARTS = {"weights": "abc", "dtype": "float32"}
SCORES = {"0/a": torch.tensor([-0.5, -1.25]), "0/b": torch.tensor([-3.0]), "1/a": torch.zeros(0)}


def read(cache: ScoreCache) -> dict[str, torch.Tensor]:
    return dict(ScoreTable(list(cache.shards().values())))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def written(root: Path) -> tuple[ScoreCache, Path]:
    cache = ScoreCache(root, PARTS, rank=0)
    cache.write(SCORES)
    (path,) = cache.folder.glob("*.arrow")
    return cache, path


def test_what_is_written_comes_back_from_every_rank(tmp_path):
    """Not what is being written, which stays."""
    cache, path = written(tmp_path)
    ScoreCache(tmp_path, PARTS, rank=1).write({"2/a": torch.ones(4, dtype=torch.bfloat16)})
    for name in (f".{path.name}", f".{path.name}.part"):
        (path.parent / name).write_bytes(b"half")
    assert same(read(cache), SCORES | {"2/a": torch.ones(4)})
    assert sum(p.name.startswith(".") for p in cache.folder.iterdir()) == 2
    assert read(ScoreCache(tmp_path, PARTS | {"weights": "other"}, rank=0)) == {}


def test_no_flipped_bit_comes_back(tmp_path, capsys):
    """Every byte of the file in turn, its end, and the file of other weights. What is damaged is removed, and
    scored again."""
    cache, path = written(tmp_path)
    content = path.read_bytes()
    flipped = (content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] for at in range(len(content)))
    for number, damaged in enumerate((content[:-3], b"", *flipped)):
        path.write_bytes(damaged)
        assert read(cache) == {} and not path.exists(), number
    other = ScoreCache(tmp_path, PARTS | {"weights": "other"}, rank=0)
    other.folder.mkdir(parents=True)
    (other.folder / path.name).write_bytes(content)
    assert read(other) == {}, "those of other weights"
    assert "its rows are scored again" in capsys.readouterr().out
    cache.write(SCORES)
    assert same(read(cache), SCORES)


def test_without_room_it_says_so_and_leaves_nothing(tmp_path):
    cache, _ = written(tmp_path)
    with full_disk(1000), pytest.raises(StoppedError, match=r"scores cannot be written .*cache_dir"):
        cache.write({"x": torch.zeros(1000)})
    assert same(read(cache), SCORES) and not list(cache.folder.glob("*.part"))


@pytest.mark.parametrize("how", ["cut", "another score"])
def test_a_shard_that_changes_while_it_is_read_ends_the_run_and_names_the_file(tmp_path, how):
    """In place; a mapped file would give other weights without a word, or end the process with SIGBUS."""
    cache, path = written(tmp_path)
    table = ScoreTable(list(cache.shards().values()))
    content = path.read_bytes()
    at = content.index(SCORES["0/a"].numpy().tobytes())
    with path.open("r+b") as file:
        file.seek(at)
        file.truncate() if how == "cut" else file.write(torch.tensor([-0.25]).numpy().tobytes())
    with pytest.raises(StoppedError, match=f"{path}.*resume=true"):
        table["0/a"]
    assert read(cache) == {} and not path.exists(), "the next start scores its rows again"


KEYS = st.text("0a/", min_size=1, max_size=2) | st.text("0123456789abcdef/", min_size=1, max_size=40)
SHARDS = st.lists(
    st.dictionaries(KEYS, st.lists(st.floats(-9, 0, width=32), max_size=5), max_size=6), max_size=4
)


@given(SHARDS, st.lists(KEYS, max_size=5))
def test_the_last_shard_that_has_a_key_counts(tmp_path_factory, shards, others):
    want = {key: values for shard in shards for key, values in shard.items()}
    cache = ScoreCache(tmp_path_factory.mktemp("cache"), PARTS, rank=0)
    for number, shard in enumerate(shards):
        with patch.object(score_cache, "uuid4", lambda name=number: Mock(hex=f"{name}")):
            cache.write({k: torch.tensor(v) for k, v in shard.items()})
    table = ScoreTable(list(cache.shards().values()))
    assert {key: values.tolist() for key, values in table.items()} == want and len(table) == len(want)
    keys = [*want, *others]
    missing = table.missing(np.array([key.encode() for key in keys], "S"))
    assert missing.tolist() == [key not in want for key in keys]
    for key in set(others) - set(want):
        with pytest.raises(KeyError):
            table[key]
