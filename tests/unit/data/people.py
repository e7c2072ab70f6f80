"""Rows as people bring them, files of them, and what they become."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import yaml

from config.schema_data import DataConfig
from data.rows import Loaded, Row
from data.sources import convert

ROWS = yaml.safe_load((Path(__file__).parent / "rows.yaml").read_text(encoding="utf-8"))
"""Rows of every format, and of published sets."""


def words(loaded: Loaded) -> list[tuple]:
    """Of each group: what the turns of its prompt say, its answers, their rewards."""
    return [
        ([t.content for t in group.prompt.turns], [c.text for c in group.completions], group.rewards)
        for group in loaded.groups
    ]


def said(*contents: str, role: str = "role", content: str = "content", names=("user", "assistant")) -> list:
    """Messages of speakers in turn."""
    return [{role: names[i % 2], content: text} for i, text in enumerate(contents)]


def load(*records: dict, **settings: object) -> Loaded:
    rows = [Row("f.jsonl", i, record) for i, record in enumerate(records, 1)]
    return convert(rows, DataConfig(name="t", source="-", **settings), "f.jsonl")


def lines(path: Path, records: Iterable[object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def local(path: object, **settings: object) -> DataConfig:
    """The settings of a local file or folder, of which nothing is held out unless ``settings`` say so."""
    source = {"name": "t", "source": "data.sources.local", "path": None if path is None else str(path)}
    return DataConfig(**{"eval_fraction": 0.0, **source, **settings})
