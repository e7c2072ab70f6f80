"""Scores on disk: what comes back is what was written, or nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from common.errors import StoppedError
from models.score_cache import ScoreCache
from models.score_table import ScoreTable
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
    (path,) = cache.folder.glob("*.safetensors")
    return cache, path


def test_what_is_written_comes_back_from_every_rank(tmp_path):
    cache, _ = written(tmp_path)
    ScoreCache(tmp_path, PARTS, rank=1).write({"2/a": torch.ones(4, dtype=torch.bfloat16)})
    assert same(read(cache), SCORES | {"2/a": torch.ones(4)})
    assert read(ScoreCache(tmp_path, PARTS | {"weights": "other"}, rank=0)) == {}


def test_no_flipped_bit_comes_back(tmp_path, capsys):
    """Every byte of the file in turn: what is read is what was written or nothing at all."""
    cache, path = written(tmp_path)
    content, unseen = path.read_bytes(), 0
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        found = read(cache)
        assert not found or same(found, SCORES), f"byte {at}"
        unseen += bool(found)
        assert bool(found) == path.exists(), "what is damaged is removed, and scored again once"
    assert unseen < 8, "a name of the format's own header may change without a score's doing so"
    assert "its rows are scored again" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["cut", "empty", "without a checksum", "of other weights"])
def test_a_shard_that_is_not_what_was_written_is_scored_again(tmp_path, how, capsys):
    cache, path = written(tmp_path)
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-3])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "without a checksum":
        from safetensors.torch import save_file

        save_file(SCORES, path)
    else:
        other = ScoreCache(tmp_path, PARTS | {"weights": "other"}, rank=0)
        other.folder.mkdir(parents=True)
        cache = other
        shutil.move(path, other.folder / path.name)
    assert read(cache) == {} and "scored again" in capsys.readouterr().out
    cache.write(SCORES)
    assert same(read(cache), SCORES)


def test_a_shard_that_is_being_written_is_not_read_and_not_removed(tmp_path):
    cache, path = written(tmp_path)
    for name in (f".{path.name}", f".{path.name}.part"):
        (path.parent / name).write_bytes(b"half")
    assert same(read(cache), SCORES)
    assert sum(p.name.startswith(".") for p in cache.folder.iterdir()) == 2


def test_without_room_it_says_so_and_leaves_nothing(tmp_path):
    cache, _ = written(tmp_path)
    with full_disk(1000), pytest.raises(StoppedError, match=r"scores cannot be written .*cache_dir"):
        cache.write({"x": torch.zeros(1000)})
    assert same(read(cache), SCORES) and not list(cache.folder.glob("*.part"))
