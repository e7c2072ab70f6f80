"""Loading of groups from local files, hub data sets or any function that a yaml names, through
``load_splits`` (a run's own data) or ``load_groups`` (one split).

Rows that cannot be used are counted and named, never skipped silently. Training and evaluation never share a
prompt by accident: if no evaluation data are named, a share of the prompts is held out by their identity.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from common.errors import ConfigError, DataError, one_of
from common.imports import import_function
from common.progress import phase
from config.schema_data import DataConfig
from data import published
from data.columns import Columns, Propose, UnreadError, check_named, no_proposal, proposal, renamed
from data.detection import GENERIC, format_of
from data.formats import number
from data.markup import Reader
from data.rows import SUFFIXES, Dropped, Loaded, Row, RowError, class_names, read_rows, reasons, table_rows
from data.types import Group, Turn
from data.views import exceeds, keep_shares

Split = Literal["train", "eval"]
Source = Callable[[DataConfig, str], Loaded]
LOCAL, HUB = "data.sources.local", "data.sources.hub_table"


def load_groups(config: DataConfig, split: Split) -> Loaded:
    """Return the groups of one split, with system turns added to the prompts.

    Evaluation groups come from ``eval_path`` or ``eval_split``. If neither is given, they come from the
    prompts held out of the training data (``eval_fraction``, by prompt id: the same prompts on every run,
    whatever the order of the rows). With ``eval_fraction`` 0 they come from the source itself, which may have
    none.

    Raises ConfigError for a setting that cannot be honoured, DataError when no row at all can be used.
    """
    one_of("split", split, ("train", "eval"))
    return _of_splits(config, split)[0]


def load_splits(config: DataConfig) -> tuple[Loaded, Loaded]:
    """Return ``load_groups`` of training and of evaluation. The data are read once if evaluation is held out
    of training."""
    train, evaluation = _of_splits(config, "train", "eval")
    return train, evaluation


def _of_splits(config: DataConfig, *splits: Split) -> list[Loaded]:
    config = _local_copy(config)
    if config.eval_path is not None or config.eval_split is not None or config.eval_fraction == 0:
        return [_finished(config, _load(config, split), split) for split in splits]
    whole = _load(config, "train")
    return [_finished(config, hold_out(whole, config.eval_fraction, split), split) for split in splits]


def _local_copy(config: DataConfig) -> DataConfig:
    """Return settings that read from disk if the path of a hub set is a local file or was saved to disk. The
    evaluation split is the hub's and does not apply to a file."""
    if config.source != HUB or not _is_local(config.path, config.data_dir):
        return config
    folder = os.path.isdir(config.path or "")
    return replace(config, source=LOCAL, eval_split=config.eval_split if folder else None)


def _load(config: DataConfig, split: str) -> Loaded:
    source: Source = import_function("data.source", config.source)
    with phase(f"read {config.path or config.name} ({split})"):
        loaded = source(config, split)
    _check_usable(config, loaded)
    return loaded


def _finished(config: DataConfig, loaded: Loaded, split: Split) -> Loaded:
    """Return ``loaded`` without groups whose rewards are too close, with the system prompt, and of training
    data only the configured shares of desirable and undesirable examples. The system prompt is added after
    the split, so that it does not change which prompts are held out."""
    groups, dropped = loaded.groups, loaded.dropped
    if (threshold := config.score_threshold) > 0:
        far = [
            group
            for group in groups
            if len(group.rewards) < 2 or exceeds(max(group.rewards), min(group.rewards), threshold)
        ]
        reason = f"rewards differ by less than data.score_threshold={threshold:g}"
        why = Dropped(loaded.origin, 0, reason, intended=True)
        dropped = [*dropped, *[why] * (len(groups) - len(far))]
        groups = far
    if config.system_prompt is not None:
        system = Turn("system", published.SYSTEM_PROMPTS.get(config.system_prompt, config.system_prompt))
        groups = [
            group
            if group.prompt.turns[0].role == "system"
            else replace(group, prompt=replace(group.prompt, turns=(system, *group.prompt.turns)))
            for group in groups
        ]
    shares = (config.frac_unique_desirable, config.frac_unique_undesirable)
    if split == "train" and shares != (1, 1):
        groups = list(keep_shares(groups, *shares))
    return replace(loaded, groups=groups, dropped=dropped)


def hold_out(loaded: Loaded, fraction: float, split: str) -> Loaded:
    """Return the training or the evaluation part of ``loaded``. Evaluation is the ``fraction`` of the prompts
    with the smallest ids, at least one. All groups of a prompt stay together, and a single prompt is not held
    out."""
    of_rows: dict[str, str] = {}  # what a row became stays on one side: the answers of one conversation
    names = [of_rows.setdefault(group.place or group.prompt.id, group.prompt.id) for group in loaded.groups]
    ids = np.array(names, "S16")
    distinct = np.unique(ids)
    count = math.ceil(fraction * len(distinct)) if len(distinct) > 1 else 0
    evaluation = np.isin(ids, distinct[:count])
    kept = [loaded.groups[i] for i in np.flatnonzero(evaluation == (split == "eval"))]
    how = f"held out for evaluation by prompt id (data.eval_fraction={fraction:g})"
    origin = f"{loaded.origin}; {count} of {len(distinct)} prompts {how}"
    return replace(loaded, groups=kept, origin=origin)


# Sources that a yaml may name


def local(config: DataConfig, split: str) -> Loaded:
    """Load a local file or folder (``data.path``; ``data.eval_path`` for evaluation): a file of
    ``data.rows.SUFFIXES``, a folder of such files, or what ``datasets`` saved to disk. From a folder with
    several splits, ``data.split`` and ``data.eval_split`` are read."""
    train, has_eval_path = split == "train", split == "eval" and config.eval_path is not None
    key, path = ("data.eval_path", config.eval_path) if has_eval_path else ("data.path", config.path)
    split_key, name = ("data.split", config.split) if train else ("data.eval_split", config.eval_split)
    if path is None:
        raise ConfigError("data.path", None, "give the file, as in data.path=pairs.jsonl")
    if name is None and not has_eval_path:
        return Loaded([], 0, origin="no evaluation data (data.eval_path is null and data.eval_fraction is 0)")
    folder = os.path.isdir(path)
    rows = folder_rows(Path(path), name, key, split_key) if folder else read_rows(Path(path), key)
    if not train and not has_eval_path and not folder:
        splits = (row.values.get("split") for row in read_rows(Path(path)) if isinstance(row, Row))
        why = f'no row of {path} says "split": "{name}"; give the evaluation file as data.eval_path'
        if not _has_splits(config) or name not in splits:
            raise ConfigError(split_key, name, why)
    if train or not (has_eval_path or folder):
        rows = _of_split(config, rows, name)
    return convert(rows, config, f"{path}{files_of(Path(path), name)}" if folder else path)


def hub_table(config: DataConfig, split: str) -> Loaded:
    """Load a data set of the Hugging Face hub (``data.path``, ``subset``, ``data_dir``, ``revision``;
    ``split`` and ``eval_split``).

    ``data.eval_path`` is a file, which is read whole, or another hub set, whose whole ``eval_split`` is read.
    Raises ConfigError if the hub has no such data set, subset or split, or cannot be reached.
    """
    if config.path is None:
        raise ConfigError("data.path", None, "give the data set's name, as in data.path=org/name")
    if split == "eval" and config.eval_path is None and config.eval_split is None:
        return Loaded([], 0, origin="no evaluation data (data.eval_split is null, data.eval_fraction is 0)")
    if split == "eval" and _is_local(config.eval_path):
        return local(config, split)
    path = config.path if split == "train" else config.eval_path or config.path
    name = config.split if split == "train" else config.eval_split or config.split
    import datasets  # imported here: the import takes a second, and local files do not need it

    try:
        table = datasets.load_dataset(
            path, name=config.subset, split=name, data_dir=config.data_dir, revision=config.revision
        )
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise _not_of_the_hub(path, name, config.subset, str(error)) from error
    # reading by Arrow's batches is several times as fast as row by row
    parts = table.with_format("arrow").iter(batch_size=1000)
    rows = table_rows(path, parts, class_names(table.features))
    # A set of one split may say in a column which rows are the test's; a sum of splits names none.
    if split == "train" and "+" not in name:
        rows = _of_split(config, rows, name.partition("[")[0])
    return convert(rows, config, f"{path} ({name})")


def _not_of_the_hub(path: str, split: str, subset: str | None, message: str) -> ConfigError:
    first_line = message.strip().splitlines()[0] if message.strip() else "no reason given"
    if "Unknown split" in message:
        return ConfigError("data.split", split, f"{path} has no such split: {first_line}")
    if "BuilderConfig" in message or "Config name is missing" in message:
        return ConfigError("data.subset", subset, f"{path}: {first_line}")
    why = f"cannot be loaded ({first_line}); use org/name of a public data set, or data=local with a file"
    return ConfigError("data.path", path, why)


def _is_local(path: str | None, data_dir: str | None = None) -> bool:
    """Return whether a path is read here: a file, or a folder that is no clone of a repository of the hub.
    A clone has a README.md, or the ``data_dir``, and ``datasets`` knows its subsets and splits."""
    if path is None or os.path.isfile(path) or path.endswith(SUFFIXES) or is_saved(Path(path)):
        return path is not None
    clone = any(os.path.exists(os.path.join(path, name)) for name in ("README.md", data_dir) if name)
    return os.path.isdir(path) and not clone


def _has_splits(config: DataConfig) -> bool:
    """Return whether a column ``split`` of a file says which split a row belongs to."""
    return "split" not in (*(config.ignore_columns or ()), *(config.columns or {}).values())


def _of_split(
    config: DataConfig, rows: Iterable[Row | Dropped], wanted: str | None
) -> Iterator[Row | Dropped]:
    """Yield the rows of one split (None: of all), without the column that names it. A row that names none
    belongs to all."""
    for row in rows:
        split = row.values.get("split") if isinstance(row, Row) and _has_splits(config) else None
        if isinstance(row, Dropped) or wanted is None or not isinstance(split, str):
            yield row
        elif split != wanted:
            why = f"says split: {split!r}, not {wanted!r} (data.split; data.ignore_columns=[split] reads all)"
            yield Dropped(row.file, row.number, why, intended=True)
        else:
            yield replace(row, values={name: cell for name, cell in row.values.items() if name != "split"})


# From rows to groups


FIRST = 64
"""Rows whose columns show the format together, because the first row may be an odd one."""
TRIED = 16
"""Rows that a proposal is tried on."""
EARLY = 1000
"""Rows by which the kind of data is judged; a shorter file is known whole."""


def convert(
    rows: Iterable[Row | Dropped], config: DataConfig, origin: str, propose: Propose | None = None
) -> Loaded:
    """Convert rows by ``data.format``, or by the format that the columns of the first rows show. ``propose``
    says what to type for columns that nothing reads; by default what reads the first rows."""
    loaded = Loaded([], 0, origin=origin)

    def readable() -> Iterator[Row]:
        for row in rows:
            loaded.read += 1
            if isinstance(row, Row):
                yield row
            else:
                loaded.dropped.append(row)

    stream = readable()
    first = list(itertools.islice(stream, FIRST))
    if not first and not loaded.read:
        raise DataError(f"{origin}: holds no row")
    if not first:
        return loaded
    check_named(config, first)
    if propose is None:
        propose = partial(proposal, first[:TRIED], config, unread=partial(_unread, first[:TRIED], config))
    first = [replace(row, values=renamed(row.values, config)) for row in first]
    loaded.format, form = format_of(config, first, propose)
    # The others' columns are those of published files, whose function knows what it leaves out
    seen = Columns(config, loaded.format in GENERIC, loaded.format != "prompt_only", propose)
    answers, texts = References(), Reader(config)

    def usable() -> Iterator[Group]:
        named = (replace(row, values=renamed(row.values, config)) for row in stream)
        converted = map(seen.noted, form(seen.watched(itertools.chain(first, named)), config))
        for result, row in texts.read(converted):
            group = answers.checked(with_numbers(result, row, config.numbers or ()), row)
            if isinstance(group, Dropped):
                loaded.dropped.append(group)
            else:
                yield group

    loaded.groups = list(usable())
    seen.check()
    loaded.columns, loaded.unused, loaded.refusal = seen.columns(True), seen.columns(False), seen.refusal
    loaded.read_back, loaded.propose = (*texts.lines, *seen.notes), propose
    return loaded


def _unread(rows: Sequence[Row], config: DataConfig, columns: Mapping[str, str]) -> Sequence[str] | None:
    """Return the columns of rows that may decide and that are not read with these ``data.columns``; None
    where the rows cannot be read so."""
    tried = replace(config, columns=dict(columns))
    new = columns.keys() - (config.columns or {}).keys()
    try:
        loaded = convert(rows, tried, "", propose=no_proposal)
    except UnreadError as error:
        return error.names if new <= set(error.read) else None
    except (ConfigError, DataError):
        return None
    lost = sum(not row.intended for row in loaded.dropped)
    if not loaded.groups or lost > config.max_unreadable * len(rows) or not new <= set(loaded.columns):
        return None
    return loaded.refusal.names if isinstance(loaded.refusal, UnreadError) else []


def with_numbers(group: Group | Dropped, row: Row | None, names: Iterable[str]) -> Group | Dropped:
    """Return the group with the row's values of the columns ``names``, or why it is left out. Raises
    ConfigError for a group that is made of several rows (``row`` is None)."""
    if isinstance(group, Dropped) or not names:
        return group
    if row is None:
        raise ConfigError("data.numbers", list(names), "belong to a row, and this format joins several rows")
    try:
        return replace(group, numbers=tuple(number(row.values, name) for name in names))
    except RowError as error:
        return error.dropped(row)


class References:
    """The reference answer of each prompt so far. A prompt has one, so a row that brings another is left out:
    nobody can say which of the two is right. Of rows of prompts alone the first one's columns are kept."""

    def __init__(self) -> None:
        self._of: dict[str, str] = {}
        self._columns: dict[str, int] = {}

    def checked(self, group: Group | Dropped, row: Row | None) -> Group | Dropped:
        """Return ``group``, made of ``row`` (None: of several), or why it is left out."""
        if isinstance(group, Dropped):
            return group
        answer, columns = group.prompt.reference_answer, group.prompt.columns
        place = (row.file, row.number) if row else ("", 0)
        if answer is not None and self._of.setdefault(group.prompt.id, answer) != answer:
            return Dropped(*place, "the same prompt came before with another reference answer")
        prompt_alone = columns and not group.completions
        if prompt_alone and self._columns.setdefault(group.prompt.id, hash(columns)) != hash(columns):
            why = "the same prompt came before with other values in its columns"
            return Dropped(*place, why, intended=True)
        return group


def _check_usable(config: DataConfig, loaded: Loaded) -> None:
    """Raise DataError if no row can be used, ConfigError if too many of them cannot be read."""
    first = next((row for row in loaded.dropped if not row.intended), None)
    why = reasons(Counter(row.reason for row in loaded.dropped)) or "the source does not say why"
    if first is not None:
        why += f"; the first is {first.file} row {first.row}" if first.row else ""
    if loaded.read and not loaded.groups:
        none = f"{loaded.origin}: none of the {loaded.read} rows can be used: {why}"
        if not loaded.format:
            latin = "; iconv -f LATIN1 -t UTF-8 OLD > NEW converts a Western text" * ("is not UTF-8" in why)
            raise DataError(f"{none}{latin}")
        way = loaded.propose(loaded.unused)
        raise DataError(
            f"{none}; they were read as {loaded.format} ({', '.join(loaded.columns)}). If they mean "
            f"something else, say it with {way or 'data.columns'} or data.format"
        )
    lost = sum(not row.intended for row in loaded.dropped)
    if lost > config.max_unreadable * loaded.read:
        share = math.ceil(100 * lost / loaded.read) / 100
        raise ConfigError(
            "data.max_unreadable",
            config.max_unreadable,
            f"{lost} of the {loaded.read} rows of {loaded.origin} cannot be read: {why}. Mend them, or type "
            f"data.max_unreadable={share:g} to train without them",
        )


# Folders: what ``datasets`` saved to disk, and shards that a user put into one


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
        why = f"has no file that can be read; put {', '.join(SUFFIXES)} into it, or name one"
        raise ConfigError(key, folder, why)
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
        hidden = path.name in _ABOUT or any(part.startswith((".", "_")) for part in inner.parts)
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
    alike = [name for name in there if name.lower() == (split or "").lower()]
    wanted = [split] if split in there else alike
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
