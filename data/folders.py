"""Folders of data: what ``datasets`` saved to disk, and shards that a user put into one folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from common.errors import ConfigError, DataError
from data.rows import SUFFIXES, Dropped, Row, class_names, read_rows, table_rows

_SPLIT = re.compile(
    r"(?:^|[-_.])(train|test|validation|valid|val|dev|eval|h[eo]ld[-_]?out)\w*(?:[-_.]|$)", re.IGNORECASE
)
"""The part of a shard's name that says which split it belongs to: train-00000-of-00002, Test.jsonl,
test_prefs-0, held_out."""
_LABELS = re.compile(r"-\d{5}-of-\d{5}(?:-[0-9a-f]+)?$")
_ABOUT = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files that ``datasets`` writes beside the data, which describe the data."""


def folder_rows(folder: Path, split: str | None, key: str, split_key: str) -> Iterator[Row | Dropped]:
    """Stream the rows of one split of a folder; if ``split`` is None, of its only split.

    ``key`` and ``split_key`` are the settings that named folder and split, for messages. Raises ConfigError
    for a folder without data and for a missing split, DataError for damaged data.
    """
    if is_saved(folder):
        yield from _saved(folder, split, key, split_key)
        return
    splits = shards(folder)
    if not splits:
        raise ConfigError(
            key, folder, f"has no file that can be read; put {', '.join(SUFFIXES)} into it, or name one"
        )
    for path in splits[_chosen(list(splits), split, folder, split_key)]:
        where = path.relative_to(folder).as_posix()
        yield from (replace(row, file=where) for row in read_rows(path, key))


def is_saved(folder: Path) -> bool:
    """Return whether ``save_to_disk`` of a Dataset or a DatasetDict wrote the folder."""
    return any(os.path.isfile(folder / name) for name in ("dataset_dict.json", "state.json"))


def shards(folder: Path) -> dict[str, list[Path]]:
    """Return the files of each split, sorted by name. The split is part of the file's name or of its folder's
    name; files without one belong to "train"."""
    splits: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        inner = path.relative_to(folder)
        hidden = any(part.startswith((".", "_")) for part in inner.parts)
        hidden = hidden or path.name in _ABOUT
        if not hidden and not path.is_dir() and path.name.endswith(SUFFIXES):
            splits.setdefault(_split_of(inner), []).append(path)
    return splits


def files_of(folder: Path, split: str | None) -> str:
    """Return the names of the files that ``folder_rows`` reads, in words; "" for what ``datasets`` saved."""
    splits = {} if is_saved(folder) else shards(folder)
    files = splits.get((split or "").lower()) or (next(iter(splits.values())) if len(splits) == 1 else [])
    names = [path.relative_to(folder).as_posix() for path in files]
    return f" ({', '.join(names[:4])}{', …' if len(names) > 4 else ''})" if names else ""


def _split_of(inner: Path) -> str:
    """train-00000-of-00002.parquet -> train; test_prefs/0.jsonl -> test_prefs; pairs-00001.jsonl -> train."""
    stem = inner.name.partition(".")[0]
    for name in (stem, *reversed(inner.parts[:-1])):
        bare = _LABELS.sub("", name)
        if match := _SPLIT.search(bare):
            return (bare if bare.startswith(match[1]) else match[1]).lower()
    return "train"


def _chosen(there: list[str], split: str | None, folder: Path, key: str) -> str:
    wanted = [name for name in there if name == split] or [
        n for n in there if n.lower() == (split or "").lower()
    ]
    if len(wanted) == 1:
        return wanted[0]
    if split is None and len(there) == 1:
        return there[0]
    raise ConfigError(key, split, f"{folder} has {', '.join(sorted(there))}: give one of them")


def _saved(folder: Path, split: str | None, key: str, split_key: str) -> Iterator[Row | Dropped]:
    """Yield the rows of what ``save_to_disk`` wrote: a Dataset, or one split of a DatasetDict."""
    import datasets  # imported here: the import takes a second, and plain files do not need it

    try:
        dataset = datasets.load_from_disk(str(folder))
        if isinstance(dataset, datasets.DatasetDict):
            name = _chosen([str(name) for name in dataset], split, folder, split_key)
            dataset, where = dataset[name], f"{folder.name}/{name}"
        else:
            where = folder.name
        parts = dataset.with_format("arrow").iter(batch_size=1000)
        yield from table_rows(where, parts, class_names(dataset.features))
    except ConfigError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        first = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise DataError(f"{folder}: cannot be read ({first[0]}); save it again with save_to_disk") from error
